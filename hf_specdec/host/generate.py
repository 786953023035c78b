"""What `generate` of transformers does inside, and the names in it that differ between versions (5.17 to 5.24)."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, GenerationMixin
from transformers.utils import ModelOutput

# 5.18 renamed `past_key_values` to `cache`, in forward, in its output, in model_kwargs and in generate's output
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# the arguments of `generate` in their order, `self` first; those of the model come besides
GENERATE_PARAMETERS = (
    "self",
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)


def named_arguments(generate: Any, model: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `generate` by name, also where others have wrapped it and take just any.

    Raises:
        TypeError: there are too many, or one is given twice.
    """
    parameters = _parameters(generate)
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        names = list(GENERATE_PARAMETERS[1:])
    if len(args) > len(names):
        raise TypeError(f"generate() takes at most {len(names)} positional arguments, got {len(args)}")
    positional = dict(zip(names, args, strict=False))
    twice = positional.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"generate() got several values for {', '.join(sorted(twice))}")
    return {**positional, **kwargs}


def named_parameters(generate: Any) -> set[str]:
    """The parameters of a `generate` that are not the model's."""
    return {*GENERATE_PARAMETERS, *(parameter.name for parameter in _parameters(generate))}


def _parameters(generate: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(inspect.unwrap(generate)).parameters.values())


def output_of_generate(
    cache: Any,
    source: Any | None,
    hidden_states: Any,
    attentions: Any,
    cross_attentions: Any,
    **fields: Any,
) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
    """What `generate` returns with `return_dict_in_generate`, its cache under the name that this version uses.

    Args:
        cache: of the call.
        source: what the encoder gave, None where there is none.
        hidden_states, attentions, cross_attentions: per step, of the part that decodes.
        fields: the others.
    """
    fields[CACHE_KEY] = cache
    if source is None:
        return GenerateDecoderOnlyOutput(hidden_states=hidden_states, attentions=attentions, **fields)
    if attentions is not None:
        fields["encoder_attentions"] = source.get("attentions")
    if hidden_states is not None:
        fields["encoder_hidden_states"] = source.get("hidden_states")
    return GenerateEncoderDecoderOutput(
        decoder_hidden_states=hidden_states,
        decoder_attentions=attentions,
        cross_attentions=cross_attentions,
        **fields,
    )


def planned_step(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that plain decoding's first step after the prompts' forward would be given.

    Args:
        model: the model.
        input_ids: `[B, P]`, the prompts.
        model_kwargs: of the call, before the prompts' forward.
    """
    nothing = ModelOutput()
    after = model._update_model_kwargs_for_generation(
        nothing, dict(model_kwargs), is_encoder_decoder=model.config.is_encoder_decoder
    )
    longer = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    return model.prepare_inputs_for_generation(longer, next_sequence_length=1, **after)


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


def foreign_steps(model: Any) -> list[str]:
    """Methods of the model that make the inputs of every step of `generate`, and are not transformers' own."""
    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    methods = {name: getattr(model, name) for name in names}
    return [name for name, method in methods.items() if (method.__module__ or "").split(".")[0] != "transformers"]


def pad_token(generation_config: GenerationConfig) -> int:
    """The token that finished rows go on with; 0 where none is set."""
    token = generation_config._pad_token_tensor
    return int(token) if token is not None else 0


def keep_own_entries(generation_config: GenerationConfig) -> None:
    """Let entries that transformers does not know survive saving and loading.

    It drops them from a config that it derived from the model's own.
    """
    generation_config._from_model_config = False
