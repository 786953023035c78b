"""The way in: `speculative_mode=` on every `generate` of transformers.

`install()` puts one thin wrapper over `GenerationMixin.generate`. Where no mode is asked for, the original runs with
the arguments as they came. Otherwise the call is checked, and the original runs with our decoding as its
`custom_generate`: transformers prepares inputs, cache, processors and criteria, and we decode.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, GenerationConfig, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerationMixin

from .config import SpeculativeConfig, make_config
from .decoding import accept
from .decoding.control import AdaptiveController, Controller, FixedController, experience_of
from .decoding.loop import decode
from .decoding.stats import publish
from .drafter import Drafter
from .errors import (
    ConflictingArgumentsError,
    ContextLimitError,
    EmptyPromptError,
    IncompatibleVocabularyError,
    UnsupportedCacheError,
    UnsupportedError,
    UnsupportedGenerationError,
)
from .heads import model as peft_method
from .host.names import CACHE_KEY
from .modes import Mode, Request, get_mode
from .sampling import tape_matches_multinomial
from .target import kv_cache as kv
from .target.support import check_last_hidden, check_length, check_structure, support

NO_MODE = "none"

# what may reach the model from generate's arguments; anything else would be dropped silently after the prompt
_KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "position_ids",
    CACHE_KEY,
    "past_key_values",
    "cache",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "input_ids",
    "return_dict",
}


# where another library has wrapped our wrapper, it stays beneath and does nothing
_installed = False


def install() -> None:
    """Make `speculative_mode=` work on every `generate` of transformers. Done by `import hf_specdec`; idempotent.

    Adapters of draft heads are checked from now on wherever they are loaded.
    """
    global _installed
    _installed = True
    peft_method.install()
    if hasattr(GenerationMixin.generate, "_specdec_wrapper"):
        return
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _generate(original, self, args, kwargs) if _installed else original(self, *args, **kwargs)

    generate._specdec_wrapper, generate._specdec_original = generate, original  # type: ignore[attr-defined]
    GenerationMixin.generate = generate  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo `install`."""
    global _installed
    _installed = False
    peft_method.uninstall()
    generate: Any = GenerationMixin.generate
    if getattr(generate, "_specdec_wrapper", None) is generate:  # what others have put over it stays
        GenerationMixin.generate = generate._specdec_original  # type: ignore[method-assign,union-attr]


class SpeculativeGenerationMixin(GenerationMixin):
    """`GenerationMixin` with `speculative_mode=`, for those who would rather subclass than install a wrapper.

    ```python
    class FastLlama(SpeculativeGenerationMixin, LlamaForCausalLM): ...
    ```
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As `GenerationMixin.generate`, with these arguments besides.

        Args:
            speculative_mode: name of a mode (`hf_specdec.mode_names()`), a `Drafter`, or `"none"`.
            speculative_config: settings of the mode, a dict or its config dataclass.

        Raises:
            SpeculationError: see `hf_specdec.errors`; before the model runs, with nothing changed.
        """
        return _generate(super().generate.__func__, self, args, kwargs)  # type: ignore[attr-defined]


def _generate(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    mode, settings = _asked_for(model, args, kwargs)
    kwargs.pop("speculative_mode", None)
    kwargs.pop("speculative_config", None)
    if mode is None or isinstance(kwargs.get("custom_generate"), _Decoder):
        return original(model, *args, **kwargs)
    return _Call(original, model, args, kwargs, mode, settings).run()


def _asked_for(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(mode, settings) from the arguments, else from the generation config given, else from the model's."""
    generation_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    own = getattr(model, "generation_config", None)
    mode, settings = kwargs.get("speculative_mode"), kwargs.get("speculative_config")
    for source in (generation_config, own):
        if mode is None:
            mode = getattr(source, "speculative_mode", None)
            settings = settings if settings is not None else getattr(source, "speculative_config", None)
        elif settings is None and mode == getattr(source, "speculative_mode", None):
            settings = getattr(source, "speculative_config", None)
    if mode is None and settings is not None:
        raise ConflictingArgumentsError("speculative_config was given without a speculative_mode.")
    return (None, None) if mode is False or mode == NO_MODE else (mode, settings)


class _Call:
    """One call of `generate` with a mode."""

    def __init__(
        self, original: Callable, model: Any, args: tuple, kwargs: dict[str, Any], mode: Any, settings: Any
    ) -> None:
        self.original, self.model = original, model
        bound = inspect.signature(inspect.unwrap(original)).bind(model, *args, **kwargs)
        self.arguments = dict(bound.arguments)
        self.arguments.pop("self", None)
        self.arguments.update(self.arguments.pop("kwargs", {}))
        self.mode, self.drafter = _resolve(mode)
        self.config = make_config(self.mode.config, settings, self.mode.name)

    def run(self) -> Any:
        try:
            prepared = self._prepare()
        except UnsupportedError as error:
            if self.config.on_unsupported != "plain":
                raise
            _warn_plain(error)
            self.arguments.pop("assistant_model", None)
            return self.original(self.model, **self._without_mode(self.arguments))
        return self.original(self.model, **prepared)

    def _prepare(self) -> dict[str, Any]:
        """Arguments for the original, its `custom_generate` included. Checks all that can be checked before it."""
        model, arguments = self.model, dict(self.arguments)
        check_structure(model)
        if arguments.get("custom_generate") is not None:
            raise ConflictingArgumentsError(
                "custom_generate and speculative_mode both replace the decoding loop; pass one of them."
            )
        if arguments.get("synced_gpus"):
            raise UnsupportedGenerationError(
                "synced_gpus=True keeps several processes in step, which drafts of different lengths cannot be. Leave "
                "out speculative_mode, or load the whole model on every process."
            )
        streamer = arguments.get("streamer")
        tokenizer = arguments.pop("tokenizer", None)
        assistant_tokenizer = arguments.pop("assistant_tokenizer", None)
        assistant_model = arguments.pop("assistant_model", None)
        if assistant_model is not None and not self.mode.needs_assistant:
            raise ConflictingArgumentsError(
                f"speculative_mode={self.mode.name!r} takes no assistant_model; use speculative_mode='assistant'."
            )
        _check_tokenizers(tokenizer, assistant_tokenizer)
        resolved = self._resolved_generation_config(arguments)
        self._check_generation_config(resolved)
        self._check_inputs(arguments, resolved)
        if resolved.stop_strings:
            if tokenizer is None:
                raise ConflictingArgumentsError(
                    "stop_strings needs the tokenizer: pass tokenizer= to generate as well."
                )
            # transformers does not give a custom decoding loop the tokenizer, so the criterion is made here
            stop = StopStringCriteria(tokenizer=tokenizer, stop_strings=resolved.stop_strings)
            given = arguments.get("stopping_criteria") or StoppingCriteriaList()
            arguments["stopping_criteria"] = StoppingCriteriaList([stop, *given])
            arguments["stop_strings"] = None
        abilities = support(model)
        drafter = self.drafter or self.mode.build(Request(model, assistant_model), self.config)
        if drafter.needs_hidden:
            check_last_hidden(model)
        arguments["custom_generate"] = _Decoder(self, drafter, abilities, streamer)
        return self._without_mode(arguments)

    # ------------------------------------------------------------------ checks

    def _resolved_generation_config(self, arguments: dict[str, Any]) -> GenerationConfig:
        """The generation config as `generate` will see it, and the model's keyword arguments checked by name."""
        named = set(inspect.signature(inspect.unwrap(self.original)).parameters)
        rest = {name: value for name, value in arguments.items() if name not in named}
        rest.pop("trust_remote_code", None)
        resolved, model_kwargs = self.model._prepare_generation_config(arguments.get("generation_config"), **rest)
        unknown = [
            name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN_MODEL_KWARGS
        ]
        if "inputs_embeds" in unknown:
            raise UnsupportedGenerationError(
                "A prompt given as inputs_embeds has no tokens to draft from. Pass input_ids, or leave out "
                "speculative_mode."
            )
        if unknown:
            self.model._validate_model_kwargs(model_kwargs.copy())  # a typo: transformers says so
            raise UnsupportedGenerationError(
                f"speculative_mode cannot pass {', '.join(map(repr, unknown))} on to the model's later forwards. Leave "
                "the argument or speculative_mode out."
            )
        return resolved

    def _check_generation_config(self, resolved: GenerationConfig) -> None:
        kind = resolved.get_generation_mode(None)
        name = "speculative_mode"
        if resolved.num_beams is not None and resolved.num_beams > 1:
            raise UnsupportedGenerationError(
                f"{name} decodes one sequence a row, but num_beams={resolved.num_beams}. Set num_beams=1, or "
                "speculative_mode='none'."
            )
        if kind not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise UnsupportedGenerationError(
                f"{name} works with greedy search and sampling, but this call asks for {kind.value.replace('_', ' ')}. "
                "Remove the arguments that ask for it (penalty_alpha, dola_layers, prompt_lookup_num_tokens, "
                "assistant_early_exit, ...)."
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
                f"cache_implementation={resolved.cache_implementation!r} cannot be rolled back. Use 'dynamic' or "
                "'static'."
            )

    def _check_inputs(self, arguments: dict[str, Any], resolved: GenerationConfig) -> None:
        ids = arguments.get("inputs")
        ids = arguments.get("input_ids") if ids is None else ids
        given_cache = arguments.get(CACHE_KEY, arguments.get("past_key_values"))
        if given_cache is not None:
            kv.check_kind(given_cache)
        if ids is None:
            return  # generate starts from the BOS token
        length = ids.shape[-1]
        if length == 0:
            raise EmptyPromptError("The prompt is empty: pass at least one token, or no input to start from BOS.")
        limit = position_limit(self.model)
        if limit is not None and length >= limit:
            raise ContextLimitError(
                f"The prompt has {length} tokens and {type(self.model).__name__} has {limit} positions: no token can "
                "follow. Shorten the prompt."
            )
        sources = (arguments, vars(arguments.get("generation_config") or resolved), vars(self.model.generation_config))
        asked = next((source["max_length"] for source in sources if source.get("max_length") is not None), None)
        if resolved.max_new_tokens is None and asked is not None and length >= asked:
            raise ContextLimitError(
                f"The prompt has {length} tokens and max_length={asked}: no token can follow. Pass max_new_tokens, or "
                "a larger max_length."
            )
        mask = arguments.get("attention_mask")
        if mask is not None and mask.dim() == 2 and bool((mask.sum(-1) == 0).any()):
            raise EmptyPromptError("A row of the attention_mask hides its whole prompt: there is nothing to continue.")

    def _without_mode(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if not name.startswith("speculative_")}

    # ------------------------------------------------------------------ parts of the decoding

    def make_rule(self, selection: Any) -> accept.Rule:
        if self.config.acceptance == "coupled" and (selection.tape is not None or not selection.do_sample):
            return accept.Coupled(selection)
        if self.config.acceptance == "typical":
            return accept.Typical(selection, self.config.typical_epsilon, self.config.typical_delta)
        return accept.Rejection(selection)

    def make_controller(self) -> Controller:
        if self.config.num_draft_tokens != "auto":
            return FixedController(self.config.num_draft_tokens)
        return AdaptiveController(experience_of(self.model, self.mode.name), self.config.max_draft_tokens)


class _Decoder:
    """Our decoding as a `custom_generate` callable."""

    def __init__(self, call: _Call, drafter: Drafter, abilities: Any, streamer: Any) -> None:
        self.call, self.drafter, self.abilities, self.streamer = call, drafter, abilities, streamer

    def __call__(self, model: Any, input_ids: Any, generation_config: Any, **arguments: Any) -> Any:
        cache = arguments.get(CACHE_KEY)
        used = kv.slots(cache) if isinstance(cache, Cache) else 0
        try:
            return self._decode(model, input_ids, generation_config=generation_config, **arguments)
        except UnsupportedError as error:
            # the cache that has been written to cannot be decoded from again
            if self.call.config.on_unsupported != "plain" or (isinstance(cache, Cache) and kv.slots(cache) != used):
                raise
            _warn_plain(error)
            return model._sample(input_ids, generation_config=generation_config, streamer=self.streamer, **arguments)

    def _decode(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        kv.check_kind(model_kwargs.get(CACHE_KEY))
        cache = model_kwargs[CACHE_KEY]
        mask = model_kwargs.get("attention_mask")
        shortest = input_ids.shape[1] if mask is None else int(mask.sum(-1).min())
        check_length(model, shortest, generation_config.max_length)
        if kv.capacity(cache) is not None:
            kv.check_rollback(cache, type(model).__name__, generation_config.max_length - 1)
        config = self.call.config
        coupled = config.acceptance == "coupled"
        if coupled and generation_config.do_sample and not tape_matches_multinomial(input_ids.device):
            warnings.warn(
                f"torch.multinomial on {input_ids.device} is not the exponential race that seed-exact sampling relies "
                "on; sampling goes on with acceptance='rejection': the same distribution, not the text of the seed.",
                stacklevel=2,
            )
            coupled = False
        if config.acceptance == "typical":
            warnings.warn("acceptance='typical' is lossy: the output differs from plain decoding.", stacklevel=2)
        result, stats = decode(
            model=model,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            drafter=self.drafter,
            make_rule=self.call.make_rule,
            coupled=coupled,
            controller=self.call.make_controller(),
            support=self.abilities,
            streamer=self.streamer,
            mode_name=self.call.mode.name,
            position_limit=position_limit(model),
            model_kwargs=model_kwargs,
        )
        publish(stats)
        if generation_config.return_dict_in_generate:
            result.speculation = stats
        return result


def _warn_plain(error: UnsupportedError) -> None:
    warnings.warn(f"Decoding plainly, without speculation: {error}", stacklevel=2)


def _resolve(mode: Any) -> tuple[Mode, Drafter | None]:
    """The mode, and the drafter where the user brought one."""
    if isinstance(mode, Drafter):
        name = type(mode).__name__
        return Mode(name, SpeculativeConfig, lambda request, config: mode), mode
    if isinstance(mode, Mode):
        return mode, None
    return get_mode(mode), None


def position_limit(model: Any) -> int | None:
    """Number of positions in the model's table of positions; None where positions are not looked up in one."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
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
