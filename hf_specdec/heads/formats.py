"""Draft heads between projects: other projects' files become an adapter of ours, and heads are written for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import AdapterError, ConfigurationError
from ..host.peft import checkpoint_prefix
from .config import HeadConfig
from .kind import head_kinds, kind_of

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def convert(source: str | Path, output: str | Path, base: str | None = None) -> HeadConfig:
    """Turn a folder of another project's heads into a PEFT adapter of ours. Kinds say which they read.

    Args:
        source: a folder, or a Hub id.
        output: folder to write `adapter_config.json` and `adapter_model.safetensors` to.
        base: name of the base model; None takes the one that the source names.

    Returns:
        the settings of the adapter, read off the tensors.

    Raises:
        AdapterError: there are no such heads, or their tensors do not fit together.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise AdapterError(f"{output} is a file; name a folder to write.")
    folder = _local(source)
    config, tensors = _read(folder)
    config.base_model_name_or_path = base or _named_base(folder)
    config.inference_mode = True
    output.mkdir(parents=True, exist_ok=True)
    prefix = checkpoint_prefix(config.type_name)
    save_file(
        # heads that share a tensor get one each
        {f"{prefix}{name}": tensor.clone().contiguous() for name, tensor in tensors.items()},
        output / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    config.save_pretrained(str(output))
    return config


def formats() -> list[str]:
    """Names of the formats that heads can be written in, besides PEFT's own."""
    return list(dict.fromkeys(name for kind in head_kinds() for name in kind.writers))


def export(heads: Any, to: str, output: str | Path, base: str) -> str:
    """Write heads in another project's format. Returns what to do with them.

    Args:
        heads: the heads with their base model (`find_heads`).
        to: one of `formats()`.
        output: folder to write.
        base: name of the base model.

    Raises:
        AdapterError: heads of this kind cannot be written in it.
        ConfigurationError: there is no such format.
    """
    if to not in formats():
        raise ConfigurationError(f"Unknown format {to!r}. Known formats: {', '.join(formats())}.")
    kind = kind_of(heads.config)
    if to not in kind.writers:
        can = [other.name for other in head_kinds() if to in other.writers]
        raise AdapterError(f"Heads of kind {kind.name!r} cannot be written for {to}; those that can: {', '.join(can)}.")
    return kind.writers[to](heads, Path(output), base)


def _read(folder: Path) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """What the first kind that can reads in a folder."""
    errors = []
    for reader in dict.fromkeys(kind.reader for kind in head_kinds() if kind.reader is not None):
        try:
            return reader.read(folder)
        except AdapterError as error:
            errors.append(error)
    raise errors[0]


def _local(source: str | Path) -> Path:
    """The folder itself, or the part of a Hub repository that may hold heads."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = {pattern for kind in head_kinds() if kind.reader is not None for pattern in kind.reader.files}
    try:
        return Path(snapshot_download(str(source), allow_patterns=sorted(patterns)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise AdapterError(f"{source} is neither a folder nor a model that can be had from the Hub: {error}") from error


def _named_base(folder: Path) -> str | None:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise AdapterError(f"{file} is no JSON: {error}") from error
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None
