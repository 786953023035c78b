"""Layers of KV caches that not every supported version of transformers has, or that behave differently there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from .generate import CACHE_KEY


class _NoSuchLayer:
    """Stands for a kind of cache layer that this version of transformers does not have."""


# layers without keys of their own
DummyLayer: type = getattr(cache_utils, "DummyLayer", _NoSuchLayer)
# convolutions and recurrent states
LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", _NoSuchLayer)
# keys and values besides
HYBRID_LAYERS: tuple[type, ...] = tuple(
    getattr(cache_utils, f"LinearAttentionAnd{kind}AttentionLayer", _NoSuchLayer)
    for kind in ("Full", "SlidingWindow", "StaticFull", "StaticSlidingWindow")
)
# keys of an index that picks what attention sees
IndexedLayer: type = getattr(cache_utils, "DynamicIndexedLayer", _NoSuchLayer)


class _RecordingWindowLayer(cache_utils.DynamicSlidingWindowLayer):
    """A sliding window that, while it records its past, shows attention no more of it than the mask expects.

    Later versions of transformers do so themselves; 5.17 expects a `crop` after every forward.
    """

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


RecordingWindowLayer: type = cache_utils.DynamicSlidingWindowLayer if CACHE_KEY == "cache" else _RecordingWindowLayer


def is_users_own(cache: Any) -> bool:
    """Whether the user passed this cache to `generate`."""
    return bool(getattr(cache, "_is_user_defined", False))
