"""Medusa heads in other projects' formats: read the Medusa repository's and vLLM's, write what vLLM serves.

What the tensors say counts; a `config.json` beside them is only asked for the name of the base model (the one of
medusa-vicuna-7b-v1.3 speaks of two heads where there are five). Layouts read, `h` a head and `l` a layer:

- v1, `medusa_lm_head.safetensors` or `.pt`: `{h}.{l}.linear.weight|bias` and `{h}.{number of layers}.weight`, the
  head's own LM head; v2 the same without it: the base model's is shared.
- Medusa-2: a whole model's safetensors with the same names after `medusa_head.`.
- vLLM: `blocks.{h}.layers.{l}.weight|bias`, `lm_heads.{h}.weight`, perhaps `token_map`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...errors import AdapterError
from ..files import load_tensors
from .config import MedusaConfig
from .network import BoundHeads

_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_NUMBER = r"(0|[1-9]\d{0,3})"
_BLOCK = re.compile(rf"{_NUMBER}\.{_NUMBER}\.linear\.(weight|bias)")
_OWN_LM_HEAD = re.compile(rf"{_NUMBER}\.{_NUMBER}\.weight")
_VLLM_BLOCK = re.compile(rf"blocks\.{_NUMBER}\.layers\.{_NUMBER}\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(rf"lm_heads\.{_NUMBER}\.weight")
# what is fetched of a repository on the Hub
FILES = ("*.json", "*.safetensors", _WEIGHTS[1])


def read_heads(folder: Path) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """Settings, and tensors under our names, of the heads in a folder. Raises `AdapterError`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _read_tensors(folder).items():
        ours = _our_name(name)
        if ours is None:
            raise AdapterError(f"{folder} holds a tensor {name!r} that belongs to no layout of Medusa heads.")
        if ours in tensors:
            raise AdapterError(f"{folder} holds {ours!r} twice.")
        tensors[ours] = tensor
    return _described(tensors, folder), tensors


def _our_name(name: str) -> str | None:
    """What we call a tensor of another layout; None where it is no part of heads."""
    if block := _BLOCK.fullmatch(name) or _VLLM_BLOCK.fullmatch(name):
        head, layer, kind = block.groups()
        return f"heads.{head}.layers.{layer}.linear.{kind}"
    if own := _OWN_LM_HEAD.fullmatch(name) or _VLLM_LM_HEAD.fullmatch(name):
        return f"lm_heads.{own.group(1)}.weight"
    return name if name == "token_map" else None


def _described(tensors: dict[str, torch.Tensor], folder: Path) -> MedusaConfig:
    """The settings that these tensors, under our names, amount to; what they leave out is added."""
    layers = {tuple(map(int, re.findall(r"\d+", name)[:2])) for name in tensors if name.startswith("heads.")}
    if not layers:
        raise AdapterError(f"{folder} holds no Medusa heads.")
    num_heads, num_layers = len({head for head, _ in layers}), len({layer for _, layer in layers})
    complete = {(head, layer) for head in range(num_heads) for layer in range(num_layers)}
    own = {int(name.split(".")[1]) for name in tensors if name.startswith("lm_heads.")}
    if layers != complete or (own and own != set(range(num_heads))):
        raise AdapterError(f"{folder} holds {num_heads} heads, and not all of them with {num_layers} layers each.")
    names = [f"heads.{head}.layers.{layer}.linear" for head, layer in sorted(layers)]
    without = [name for name in names if f"{name}.weight" not in tensors]
    if without:
        raise AdapterError(f"{folder} holds a bias {without[0]}.bias without its weight.")
    for name, tensor in tensors.items():
        finite = tensor.is_floating_point() and bool(torch.isfinite(tensor).all())
        if name == "token_map":
            finite = tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex()
        if not finite or not tensor.numel():
            raise AdapterError(f"{folder} holds {name!r} that is empty, of the wrong type, or not finite.")
    first = tensors[f"{names[0]}.weight"]
    hidden_size = first.shape[-1] if first.dim() == 2 else 0
    drafted = len(tensors["lm_heads.0.weight"]) if own else None
    token_map = tensors.get("token_map")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden_size, hidden_size) for name in names}
    shapes.update({f"{name}.bias": (hidden_size,) for name in names if f"{name}.bias" in tensors})
    shapes.update({f"lm_heads.{head}.weight": (drafted or 0, hidden_size) for head in own})
    if token_map is not None and drafted is not None:
        shapes["token_map"] = (drafted,)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise AdapterError(
                f"The tensors in {folder} do not fit together: {name} is {list(tensors[name].shape)}, not "
                f"{list(shape)}."
            )
    for name in names:
        tensors.setdefault(f"{name}.bias", torch.zeros(hidden_size, dtype=first.dtype))
    if token_map is not None:
        tensors["token_map"] = token_map.long()
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        own_lm_head=bool(own),
        draft_vocab_size=None if token_map is None else len(token_map),
        hidden_size=hidden_size,
        vocab_size=drafted if token_map is None else None,
    )


def export_vllm(heads: BoundHeads, output: Path, base: str) -> str:
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
    output.mkdir(parents=True, exist_ok=True)
    weights, config = heads.weights, heads.config
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
        "original_lm_head": weights.lm_heads is None and weights.output is None,
        "torch_dtype": str(weights.dtype).removeprefix("torch."),
    }
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    speculative = {"method": "medusa", "model": str(output), "num_speculative_tokens": heads.num_heads}
    return f"vllm serve {base} --speculative-config '{json.dumps(speculative)}'"


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return _stripped(load_tensors(folder / name))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_tensors(file, only=re.compile(r"medusa_heads?\.|blocks\.\d|lm_heads\.\d|token_map$")))
    if not found:
        raise AdapterError(
            f"{folder} holds no Medusa heads: neither {' nor '.join(_WEIGHTS)}, nor a safetensors file with heads."
        )
    return _stripped(found)


def _stripped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()}
