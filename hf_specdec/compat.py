"""The names that differ between the transformers versions this package supports (5.17 to 5.24)."""

from __future__ import annotations

import inspect
from typing import Any

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
