"""The names that differ between the transformers versions this package supports (5.17 to 5.24)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import cache_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

# 5.18 renamed `past_key_values` to `cache`, in forward, in its output, in model_kwargs and in generate's output
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def decoder_only_output(cache: Any, **fields: Any) -> GenerateDecoderOnlyOutput:
    """`GenerateDecoderOnlyOutput` with its cache under the name this version uses."""
    return GenerateDecoderOnlyOutput(**fields, **{CACHE_KEY: cache})


class _NoSuchLayer:
    """Stands for a kind of cache layer that this version of transformers does not have."""


# layers without keys of their own
DummyLayer: type = getattr(cache_utils, "DummyLayer", _NoSuchLayer)
# convolutions and recurrent states
LinearAttentionLayer: type = getattr(cache_utils, "LinearAttentionLayer", _NoSuchLayer)


class _RecordingWindowLayer(cache_utils.DynamicSlidingWindowLayer):
    """A sliding window that, while it records its past, shows attention no more of it than the mask expects.

    Later versions of transformers do so themselves; 5.17 expects a `crop` after every forward.
    """

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


RecordingWindowLayer: type = cache_utils.DynamicSlidingWindowLayer if CACHE_KEY == "cache" else _RecordingWindowLayer
