"""States of a cache that no `crop` can roll back: saved before a forward, put back after it.

A recurrent state has read its tokens for good. So it is copied before drafted tokens are verified. Where all of them
were kept, nothing more is needed; otherwise the copy is put back, and the tokens that were kept are fed again, in front
of the next forward's own (`replay.py`). One copy per state is kept, and made anew only after the state has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedCacheError
from ..host.caches import HYBRID_LAYERS, LinearAttentionLayer
from ..host.tensors import version_of

# what a layer with a convolution or recurrent state keeps, by its number
_TENSORS = ("conv_states", "recurrent_states")
_FLAGS = "has_previous_state"


def keeps_states(layer: Any) -> bool:
    """Whether a layer of a filled cache keeps more than `crop` can take back, in a way known here."""
    if type(layer) is LinearAttentionLayer:
        return any(layer.is_recurrent_states_initialized.values())
    return type(layer) in HYBRID_LAYERS or _is_of_a_model(layer)


def holds_all_keys(layer: Any) -> bool:
    """Whether a layer that keeps states also holds the keys of all tokens, which can be dropped as anywhere else."""
    return type(layer) in HYBRID_LAYERS and not isinstance(layer, DynamicSlidingWindowLayer)


def _is_of_a_model(layer: Any) -> bool:
    """A growing layer of one architecture's own, such as DeepSeek-V4's, which compresses what has left its window."""
    return isinstance(layer, DynamicLayer) and type(layer).__module__.startswith("transformers.models.")


def has_states(cache: Cache) -> bool:
    """Whether a filled cache has such a layer, so that tokens must be replayed."""
    return any(keeps_states(layer) for layer in cache.layers)


def shift_states(cache: Cache, by: float) -> None:
    """Add a number to all recurrent states, so that it shows whether they are read. For self-tests."""
    for layer in cache.layers if by else ():
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                state += by


class SavedStates:
    """One copy of what the layers of a cache keep that cannot be rolled back.

    Args:
        cache: filled with the prompt.
    """

    def __init__(self, cache: Cache) -> None:
        self.layers = [_saved_layer(layer) for layer in cache.layers if keeps_states(layer)]
        # whether the copy is what the layers hold
        self._is_current = False

    def save(self) -> None:
        """Copy what the layers hold, unless the copy holds it already."""
        if not self._is_current:
            for layer in self.layers:
                layer.save()
            self._is_current = True

    def has_changed(self) -> None:
        """A forward has run, and what it read stays."""
        self._is_current = False

    def restore(self) -> None:
        """Give the layers back what was saved."""
        for layer in self.layers:
            layer.restore()
        self._is_current = True


def _saved_layer(layer: Any) -> Any:
    return _SavedReferences(layer) if _is_of_a_model(layer) else _SavedLinear(layer)


class _SavedLinear:
    """Convolution and recurrent states, which a forward overwrites in place."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.copies: dict[tuple[str, int], torch.Tensor] = {}
        self.flags: dict[int, bool] = {}
        # a window that records nothing forgets what it held
        self.window: tuple[Any, ...] | None = None

    def save(self) -> None:
        layer = self.layer
        for name in _TENSORS:
            for index, tensor in getattr(layer, name).items():
                if tensor is None:
                    continue
                copy = self.copies.get((name, index))
                if copy is None or copy.shape != tensor.shape:
                    self.copies[name, index] = tensor.clone()
                else:
                    copy.copy_(tensor)
        self.flags = dict(getattr(layer, _FLAGS))
        if isinstance(layer, DynamicSlidingWindowLayer):
            self.window = (layer.keys, layer.values, layer.cumulative_length)

    def restore(self) -> None:
        for (name, index), copy in self.copies.items():
            getattr(self.layer, name)[index].copy_(copy)  # in place: compiled forwards know the address
        getattr(self.layer, _FLAGS).update(self.flags)
        if self.window is not None:
            self.layer.keys, self.layer.values, self.layer.cumulative_length = self.window


class _SavedReferences:
    """A layer that never changes a tensor but makes a new one, so that references are enough. Checked at every use."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.entries: dict[str, Any] = {}
        self.versions: list[tuple[torch.Tensor, tuple]] = []

    def save(self) -> None:
        self.entries = {
            name: dict(value) if isinstance(value, dict) else value for name, value in vars(self.layer).items()
        }
        tensors = [
            value
            for entry in self.entries.values()
            for value in (entry.values() if isinstance(entry, dict) else (entry,))
            if isinstance(value, torch.Tensor)
        ]
        self.versions = [(tensor, version_of(tensor)) for tensor in tensors]

    def restore(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise UnsupportedCacheError(
                f"{type(self.layer).__name__} changes its states in place, so they cannot be put back after a rejected "
                "draft. Leave out speculative_mode, or pass on_unsupported='plain'."
            )
        for name, value in self.entries.items():
            held = getattr(self.layer, name)
            if isinstance(held, dict):
                held.clear()
                held.update(value)
            else:
                setattr(self.layer, name, value)
