"""Files that are there whole or not at all, and weights in the formats of several projects."""

from __future__ import annotations

import pickle
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import AdapterError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write instead of `path`, which is there whole afterwards or not at all, whoever else writes it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str) -> None:
    """Write a text file as `written_whole` does."""
    with written_whole(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def load_tensors(file: Path, only: re.Pattern[str] | None = None) -> dict[str, torch.Tensor]:
    """The named tensors in a safetensors file or a pickle, of which nothing is run.

    Args:
        file: the file.
        only: names to load of a safetensors file; None loads all.

    Raises:
        AdapterError: the file cannot be read, or holds something else.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return {key: opened.get_tensor(key) for key in list(opened.keys()) if only is None or only.match(key)}
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)  # never run what a pickle holds
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise AdapterError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in loaded.items()
    ):
        raise AdapterError(f"{file} is no dictionary of named tensors.")
    return loaded
