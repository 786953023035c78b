"""What is checked of a `generate` call with a mode, before the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .errors import (
    ConflictingArgumentsError,
    ContextLimitError,
    EmptyPromptError,
    IncompatibleVocabularyError,
    UnsupportedCacheError,
    UnsupportedGenerationError,
)
from .host.generate import CACHE_KEY, check_model_arguments
from .host.models import argument_names, text_config
from .target import kv_cache as kv

# what makes `generate` decode in another way than by greedy search or sampling
_OTHER_WAYS = (
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)


def check_arguments(arguments: Mapping[str, Any], mode_name: str, takes_assistant: bool) -> None:
    """Raise where arguments of the call exclude the mode, or one another."""
    if arguments.get("custom_generate") is not None:
        raise ConflictingArgumentsError(
            "custom_generate and speculative_mode both replace the decoding loop; pass one of them."
        )
    if arguments.get("synced_gpus"):
        raise UnsupportedGenerationError(
            "synced_gpus=True keeps several processes in step, which drafts of different lengths cannot be. Leave "
            "out speculative_mode, or load the whole model on every process."
        )
    if arguments.get("assistant_model") is not None and not takes_assistant:
        raise ConflictingArgumentsError(
            f"speculative_mode={mode_name!r} takes no assistant_model; use speculative_mode='assistant'."
        )
    if takes_assistant and not isinstance(arguments.get("assistant_model"), (torch.nn.Module, type(None))):
        raise ConflictingArgumentsError(
            f"assistant_model must be a loaded model, got {type(arguments['assistant_model']).__name__}. Load it with "
            "AutoModelForCausalLM.from_pretrained first."
        )
    _check_tokenizers(arguments.get("tokenizer"), arguments.get("assistant_tokenizer"))


def check_model_kwargs(model: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Raise for a prompt that is not made of tokens, and for arguments that the model does not know.

    What later forwards are given besides is checked once images and encoders' input are encoded
    (`extras.after_prompts`).
    """
    if model.config.is_encoder_decoder:
        return
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            "A prompt given as inputs_embeds has no tokens to draft from. Pass input_ids, or leave out "
            "speculative_mode."
        )
    check_model_arguments(model, dict(model_kwargs))  # a typo: transformers says so


def check_generation_config(resolved: GenerationConfig) -> None:
    """Raise for ways of generating that speculation does not reproduce."""
    kind = resolved.get_generation_mode(None)
    name = "speculative_mode"
    if resolved.num_beams is not None and resolved.num_beams > 1:
        raise UnsupportedGenerationError(
            f"{name} decodes one sequence per row, but num_beams={resolved.num_beams}. Set num_beams=1, or "
            "speculative_mode='none'."
        )
    if kind not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        given = [option for option in _OTHER_WAYS if getattr(resolved, option, None)]
        raise UnsupportedGenerationError(
            f"{name} works with greedy search and sampling, but this call asks for {kind.value.replace('_', ' ')}. "
            f"Remove what asks for it ({', '.join(given)}), or speculative_mode."
        )
    if resolved.use_cache is False:
        raise UnsupportedGenerationError(f"{name} needs a cache to roll back; remove use_cache=False.")
    if resolved.token_healing:
        raise UnsupportedGenerationError(f"{name} does not combine with token_healing=True.")
    if resolved.cache_implementation == "quantized":
        raise UnsupportedCacheError(
            "A quantized cache cannot drop tokens once they are quantized, so drafts cannot be rolled back. Use "
            "cache_implementation='dynamic' or 'static'."
        )
    if resolved.cache_implementation in ("offloaded", "paged"):
        raise UnsupportedCacheError(
            f"cache_implementation={resolved.cache_implementation!r} cannot be rolled back. Use 'dynamic' or 'static'."
        )


def check_inputs(model: Any, arguments: Mapping[str, Any], resolved: GenerationConfig) -> None:
    """Raise for prompts that cannot be continued, and caches that cannot be rolled back."""
    given_cache = arguments.get(CACHE_KEY, arguments.get("past_key_values"))
    if given_cache is not None:
        kv.check_kind(given_cache)
    names = argument_names(model)
    ids = arguments.get(names.ids)
    if ids is None and not model.config.is_encoder_decoder:
        ids = arguments.get("inputs")
    if ids is None:
        return  # generate starts from the BOS token, or the decoder's first
    length = ids.shape[-1]
    if length == 0:
        raise EmptyPromptError("The prompt is empty: pass at least one token, or no input to start from BOS.")
    limit = position_limit(model)
    if limit is not None and length >= limit:
        raise ContextLimitError(
            f"The prompt has {length} tokens and {type(model).__name__} has {limit} positions: no token can "
            "follow. Shorten the prompt."
        )
    sources = (arguments, vars(arguments.get("generation_config") or resolved), vars(model.generation_config))
    asked = next((source["max_length"] for source in sources if source.get("max_length") is not None), None)
    if resolved.max_new_tokens is None and asked is not None and length >= asked:
        raise ContextLimitError(
            f"The prompt has {length} tokens and max_length={asked}: no token can follow. Pass max_new_tokens, or "
            "a larger max_length."
        )
    mask = arguments.get(names.mask)
    if mask is not None and mask.dim() == 2 and bool((mask.sum(-1) == 0).any()):
        raise EmptyPromptError("A row of the attention_mask hides its whole prompt: there is nothing to continue.")


def position_limit(model: Any) -> int | None:
    """Number of positions in the model's table of positions; None where positions are not looked up in one."""
    config = text_config(model)
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    words = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not words)
    return limit if any(limit <= table.num_embeddings <= limit + 8 for table in tables) else None


def _check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    if tokenizer is None or assistant_tokenizer is None:
        return
    if tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
        raise IncompatibleVocabularyError(
            "tokenizer and assistant_tokenizer differ; the draft model's tokens must be the target's. Use a draft "
            "model of the same family."
        )
