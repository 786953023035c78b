"""The way in: `speculative_mode=` on `generate`.

Where no mode is asked for, the original `generate` runs with the arguments as they came. Otherwise the call is checked,
and the original runs with our decoding as its `custom_generate`: transformers prepares inputs, cache, processors and
criteria, and we decode.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from transformers import Cache, GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerationMixin

from .acceptance import AcceptanceRule, get_rule
from .call_checks import check_arguments, check_generation_config, check_inputs, check_model_kwargs, position_limit
from .config import SpeculativeConfig, make_config
from .context import Source
from .decoding.control import AdaptiveController, Controller, FixedController
from .decoding.experience import experience_of
from .decoding.loop import Task, decode
from .decoding.stats import publish
from .drafter import Drafter
from .errors import ConfigurationError, ConflictingArgumentsError, UnsupportedError
from .host.generate import (
    CACHE_KEY,
    decode_plainly,
    named_arguments,
    named_parameters,
    resolved_generation_config,
)
from .host.models import argument_names
from .host.peft_calls import remove_hooks_of_call
from .modes import NO_MODE, Mode, Request, get_mode
from .sampling import tape_matches_multinomial
from .target import kv_cache as kv
from .target.extras import Extras, after_prompts
from .target.hidden import check_hidden
from .target.selftest import check_padding, support
from .target.support import Support, check_decoder_only, check_length, check_steps, check_structure


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
        return generate(super().generate.__func__, self, args, kwargs)  # type: ignore[attr-defined]


def generate(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`original(model, *args, **kwargs)`, speculatively where a mode is asked for."""
    mode, settings = _asked_for(model, args, kwargs)
    kwargs.pop("speculative_mode", None)
    kwargs.pop("speculative_config", None)
    if mode is None or isinstance(kwargs.get("custom_generate"), _Decoder):
        return original(model, *args, **kwargs)
    try:
        return _Call(original, model, args, kwargs, mode, settings).run()
    except BaseException:
        remove_hooks_of_call(model)
        raise


def speculative(original: Callable) -> Callable:
    """A `generate` method that takes `speculative_mode=` and runs `original` otherwise."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return generate(original, self, args, kwargs)

    return method


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
        self.arguments = named_arguments(original, model, args, kwargs)
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
        check_steps(model)
        if self.mode.decoder_only is not None:
            check_decoder_only(model, self.mode.decoder_only)
        check_arguments(arguments, self.mode.name, self.mode.needs_assistant)
        streamer = arguments.get("streamer")
        tokenizer = arguments.pop("tokenizer", None)
        arguments.pop("assistant_tokenizer", None)
        assistant_model = arguments.pop("assistant_model", None)
        resolved, model_kwargs = self._resolved(arguments)
        check_model_kwargs(model, model_kwargs)
        check_generation_config(resolved)
        check_inputs(model, arguments, resolved)
        if resolved.stop_strings:
            self._stop_at_strings(arguments, resolved, tokenizer)
        abilities = support(model)
        drafter = self.drafter or self.mode.build(Request(model, assistant_model), self.config)
        if not isinstance(drafter, Drafter):
            raise ConfigurationError(f"Mode {self.mode.name!r} built {drafter!r}, which is no Drafter.")
        check_hidden(model, drafter.hidden)
        arguments["custom_generate"] = _Decoder(self, drafter, abilities, streamer)
        return self._without_mode(arguments)

    def _resolved(self, arguments: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
        """The generation config as `generate` will see it, and the keyword arguments that are the model's."""
        named = named_parameters(self.original)
        rest = {name: value for name, value in arguments.items() if name not in named}
        rest.pop("trust_remote_code", None)
        return resolved_generation_config(self.model, arguments.get("generation_config"), rest)

    @staticmethod
    def _stop_at_strings(arguments: dict[str, Any], resolved: GenerationConfig, tokenizer: Any) -> None:
        """transformers does not give a custom decoding loop the tokenizer, so the criterion is made here."""
        if tokenizer is None:
            raise ConflictingArgumentsError("stop_strings needs the tokenizer: pass tokenizer= to generate as well.")
        stop = StopStringCriteria(tokenizer=tokenizer, stop_strings=resolved.stop_strings)
        given = arguments.get("stopping_criteria") or StoppingCriteriaList()
        arguments["stopping_criteria"] = StoppingCriteriaList([stop, *given])
        arguments["stop_strings"] = None

    @staticmethod
    def _without_mode(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if not name.startswith("speculative_")}

    def make_controller(self) -> Controller:
        """What sizes this call's drafts."""
        if self.config.num_draft_tokens != "auto":
            return FixedController(self.config.num_draft_tokens)
        return AdaptiveController(experience_of(self.model, self.mode.name), self.config.max_draft_tokens)


class _Decoder:
    """Our decoding as a `custom_generate` callable."""

    def __init__(self, call: _Call, drafter: Drafter, abilities: Support, streamer: Any) -> None:
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
            return decode_plainly(
                model, input_ids, generation_config=generation_config, streamer=self.streamer, **arguments
            )

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
        mask, cache = model_kwargs.get(argument_names(model).mask), model_kwargs[CACHE_KEY]
        shortest = input_ids.shape[1] if mask is None else int(mask.sum(-1).min())
        check_length(model, shortest, generation_config.max_length)
        if shortest < input_ids.shape[1]:
            check_padding(model)
        if kv.capacity(cache) is not None:
            kv.check_rollback(cache, type(model).__name__, generation_config.max_length - 1)
        extras, positions = after_prompts(model, input_ids, model_kwargs)
        decoded = decode(
            Task(
                model=model,
                input_ids=input_ids,
                processors=logits_processor,
                criteria=stopping_criteria,
                generation_config=generation_config,
                model_kwargs=model_kwargs,
                streamer=self.streamer,
                mode_name=self.call.mode.name,
                drafter=self.drafter,
                rule=self._rule(generation_config.do_sample, input_ids.device),
                config=self.call.config,
                controller=self.call.make_controller(),
                support=self.abilities,
                extras=extras,
                next_positions=positions,
                source=self._source(model, input_ids.shape[0], extras),
                position_limit=position_limit(model),
            )
        )
        publish(decoded.stats)
        return decoded.result

    def _source(self, model: Any, batch: int, extras: Extras) -> Source | None:
        """What the encoder was given, a row of it for every row of the batch, and what it made of it."""
        if extras.source is None:
            return None
        arguments, name = self.call.arguments, model.main_input_name
        given = arguments.get(name) if arguments.get(name) is not None else arguments.get("inputs")
        inputs = {}
        if given is not None and batch % len(given) == 0:
            inputs[name] = given.repeat_interleave(batch // len(given), dim=0)
            inputs |= extras.source_mask
        return Source(inputs, extras.source[0])

    def _rule(self, do_sample: bool, device: Any) -> AcceptanceRule:
        """The acceptance rule that was asked for, or the one that takes its place on this device."""
        rule = get_rule(self.call.config.acceptance)
        if do_sample and rule.reads_tape and not tape_matches_multinomial(device):
            warnings.warn(
                f"torch.multinomial on {device} is not the exponential race that seed-exact sampling relies on; "
                "sampling goes on with acceptance='rejection': the same distribution, not the text of the seed.",
                stacklevel=2,
            )
            rule = get_rule("rejection")
        if not rule.lossless:
            warnings.warn(f"acceptance={rule.name!r} is lossy: the output differs from plain decoding.", stacklevel=2)
        return rule


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
