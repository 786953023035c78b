"""The target's last hidden states, as its LM head gets them, without asking the model for all of its states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch

from ..errors import UnsupportedModelError


@dataclass
class LastHidden:
    """What the LM head was given in the forward inside `watch_head`."""

    # [B, n, d], n positions of those that were scored
    hidden: torch.Tensor | None = None


@contextmanager
def watch_head(model: Any) -> Iterator[LastHidden]:
    """Keep what this thread's forward inside gives to the model's LM head.

    The hook is there for as long as the context lasts.

    Raises:
        UnsupportedModelError: the model has no LM head, or the forward did not call it as a module.
    """
    output, seen, thread = model.get_output_embeddings(), LastHidden(), get_ident()
    name = type(model).__name__
    if not isinstance(output, torch.nn.Module):
        raise UnsupportedModelError(f"{name} has no LM head, so nothing can draft from what it is given.")

    def keep(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if get_ident() == thread:  # other threads may be generating with the same model
            seen.hidden = args[0].detach()

    hook = output.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()
    if seen.hidden is None or seen.hidden.dim() != 3:
        raise UnsupportedModelError(f"{name} does not call its LM head, so nothing can draft from what it is given.")
