"""Other projects' heads: read Medusa's checkpoints, write a PEFT adapter, export what vLLM serves.

What the tensors say counts; a `config.json` beside them is only asked for the name of the base model (the one of
medusa-vicuna-7b-v1.3 speaks of two heads where there are five). Layouts read, `h` a head and `l` a layer:

- v1, `medusa_lm_head.safetensors` or `.pt`: `{h}.{l}.linear.weight|bias` and `{h}.{number of layers}.weight`, the
  head's own LM head; v2 the same without it: the base model's is shared.
- Medusa-2: a whole model's safetensors with the same names after `medusa_head.`.
- vLLM: `blocks.{h}.layers.{l}.weight|bias`, `lm_heads.{h}.weight`, perhaps `token_map`.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import AdapterError
from .config import MedusaConfig
from .model import CHECKPOINT_PREFIX
from .module import BoundHeads

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MEDUSA_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OWN_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def convert(source: str | Path, output: str | Path, base: str | None = None) -> MedusaConfig:
    """Turn a folder of Medusa heads (v1, v2, Medusa-2, vLLM) into a PEFT adapter of ours.

    Args:
        source: a folder, or a Hub id.
        output: folder to write `adapter_config.json` and `adapter_model.safetensors` to.
        base: name of the base model; None takes the one that the source names.

    Returns:
        the settings of the adapter, read off the tensors.

    Raises:
        AdapterError: there are no such heads, or their tensors do not fit together.
    """
    folder = _local(source)
    config, tensors = read_heads(folder)
    config.base_model_name_or_path = base or _named_base(folder)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    config.inference_mode = True
    config.save_pretrained(str(output))
    save_file(
        {f"{CHECKPOINT_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()},
        output / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    return config


def read_heads(folder: Path) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """Settings, and tensors under our names, of the heads in a folder. Raises `AdapterError`."""
    tensors = _read_tensors(folder)
    ours: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(name) or _VLLM_BLOCK.fullmatch(name)
        own = _OWN_LM_HEAD.fullmatch(name) or _VLLM_LM_HEAD.fullmatch(name)
        if block is not None:
            head, layer, kind = block.groups()
            ours[f"heads.{head}.layers.{layer}.linear.{kind}"] = tensor
        elif own is not None:
            ours[f"lm_heads.{own.group(1)}.weight"] = tensor
        elif name == "token_map":
            ours[name] = tensor.long()
        else:
            raise AdapterError(f"{folder} holds a tensor {name!r} that belongs to no layout of Medusa heads.")
    return _described(ours, folder), ours


def _described(tensors: dict[str, torch.Tensor], folder: Path) -> MedusaConfig:
    """The settings that these tensors, under our names, amount to; what they leave out is added."""
    layers = {tuple(map(int, re.findall(r"\d+", name)[:2])) for name in tensors if name.startswith("heads.")}
    heads, depth = {head for head, _ in layers}, {layer for _, layer in layers}
    if not layers:
        raise AdapterError(f"{folder} holds no Medusa heads.")
    num_heads, num_layers = len(heads), len(depth)
    complete = {(head, layer) for head in range(num_heads) for layer in range(num_layers)}
    own = {int(name.split(".")[1]) for name in tensors if name.startswith("lm_heads.")}
    if layers != complete or (own and own != heads):
        raise AdapterError(f"{folder} holds {num_heads} heads, and not all of them with {num_layers} layers each.")
    hidden_size = tensors["heads.0.layers.0.linear.weight"].shape[-1]
    for head, layer in sorted(layers):
        name = f"heads.{head}.layers.{layer}.linear"
        if f"{name}.weight" not in tensors:
            raise AdapterError(f"{folder} holds a bias of layer {layer} of head {head} without its weight.")
        tensors.setdefault(f"{name}.bias", torch.zeros_like(tensors[f"{name}.weight"][..., 0]))
    outputs = {tuple(tensors[f"lm_heads.{head}.weight"].shape) for head in own}
    drafted = next(iter(outputs))[0] if outputs else None
    token_map = tensors.get("token_map")
    sizes = {tuple(tensors[f"heads.{head}.layers.{layer}.linear.weight"].shape) for head, layer in layers}
    if (
        sizes != {(hidden_size, hidden_size)}
        or (outputs and outputs != {(drafted, hidden_size)})
        or (token_map is not None and drafted is not None and token_map.shape != (drafted,))
    ):
        raise AdapterError(f"The tensors in {folder} do not fit together: {sorted(sizes)}, LM heads {sorted(outputs)}.")
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        own_lm_head=bool(own),
        draft_vocab_size=None if token_map is None else len(token_map),
        hidden_size=hidden_size,
        vocab_size=drafted if token_map is None else None,
    )


def export_vllm(heads: BoundHeads, output: str | Path, base: str) -> str:
    """Write the heads in the layout that vLLM loads. Returns the command that serves them.

    Args:
        heads: the heads, with their base model (`find_heads`).
        output: folder to write `config.json` and `model.safetensors` to.
        base: name of the base model, for the command.

    Raises:
        AdapterError: vLLM has no sequential heads.
    """
    if heads.is_sequential:
        raise AdapterError(
            "vLLM's Medusa has no heads that see the tokens drafted before (sequential, Hydra). Train heads with "
            "head_type='independent' to serve them there."
        )
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    weights, config = heads.heads, heads.config
    tensors: dict[str, torch.Tensor] = {}
    blocks: Any
    for head, blocks in enumerate(weights.heads):
        for layer, block in enumerate(blocks.layers):
            for kind in ("weight", "bias"):
                tensors[f"blocks.{head}.layers.{layer}.{kind}"] = getattr(block.linear, kind)
        tensors[f"lm_heads.{head}.weight"] = heads.output_weight(head)
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    # lm_heads may be one tensor under several names, which safetensors does not hold
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, output / "model.safetensors", metadata={"format": "pt"})
    drafted = copies["lm_heads.0.weight"].shape[0]
    settings = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": copies["lm_heads.0.weight"].shape[1],
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": drafted,
        "num_heads": heads.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": weights.lm_heads is None,
        "torch_dtype": str(weights.dtype).removeprefix("torch."),
    }
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    speculative = {"method": "medusa", "model": str(output), "num_speculative_tokens": heads.num_heads}
    return f"vllm serve {base} --speculative-config '{json.dumps(speculative)}'"


# ---------------------------------------------------------------- files


def _local(source: str | Path) -> Path:
    """The folder itself, or the part of a Hub repository that may hold heads."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", _MEDUSA_WEIGHTS[1]]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise AdapterError(f"{source} is neither a folder nor a model that can be had from the Hub: {error}") from error


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    for name in _MEDUSA_WEIGHTS:
        if (folder / name).is_file():
            return _stripped(_load(folder / name))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(_load(file, only=re.compile(r"medusa_heads?\.|blocks\.\d|lm_heads\.\d|token_map$")))
    if not found:
        raise AdapterError(
            f"{folder} holds no Medusa heads: neither {' nor '.join(_MEDUSA_WEIGHTS)}, nor a safetensors file with "
            "heads."
        )
    return _stripped(found)


def _load(file: Path, only: re.Pattern[str] | None = None) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return {key: opened.get_tensor(key) for key in list(opened.keys()) if only is None or only.match(key)}
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)  # never run what a pickle holds
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise AdapterError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise AdapterError(f"{file} is no dictionary of tensors.")
    return loaded


def _stripped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()}


def _named_base(folder: Path) -> str | None:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise AdapterError(f"{file} is no JSON: {error}") from error
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None
