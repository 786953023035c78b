"""What `generate` of transformers does inside, and the names in it that differ between versions (5.17 to 5.24)."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig
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


def resolved_generation_config(
    model: Any, generation_config: GenerationConfig | None, arguments: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The generation config as `generate` will see it, and what is left of the arguments for the model."""
    return model._prepare_generation_config(generation_config, **arguments)


def check_model_arguments(model: Any, arguments: dict[str, Any]) -> None:
    """Raise `ValueError`, as `generate` does, for arguments that the model does not take."""
    model._validate_model_kwargs(arguments.copy())


def prefill(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """The forward over the prompts, as `generate` makes it."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def decode_plainly(model: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
    """The loop of `generate` for greedy decoding and sampling, called from inside it."""
    return model._sample(input_ids, **arguments)


def optimized_for_decoding(model: Any) -> AbstractContextManager[Any]:
    """What `generate` puts around its decoding loop."""
    return model._optimize_model_for_decode()


def pad_token(generation_config: GenerationConfig) -> int:
    """The token that finished rows go on with; 0 where none is set."""
    token = generation_config._pad_token_tensor
    return int(token) if token is not None else 0


def keep_own_entries(generation_config: GenerationConfig) -> None:
    """Let entries that transformers does not know survive saving and loading.

    It drops them from a config that it derived from the model's own.
    """
    generation_config._from_model_config = False
