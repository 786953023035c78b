"""The modes by name. A new mode is one `register_mode` line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import (
    AssistantConfig,
    EarlyExitConfig,
    LookaheadConfig,
    MedusaModeConfig,
    PromptLookupConfig,
    SpeculativeConfig,
)
from .drafter import Drafter
from .drafters.assistant import AssistantDrafter
from .drafters.early_exit import EarlyExitDrafter
from .drafters.lookahead import LookaheadDrafter
from .drafters.medusa import MedusaDrafter
from .drafters.prompt_lookup import PromptLookupDrafter
from .errors import ConflictingArgumentsError, UnknownModeError
from .heads import find_exit, find_heads, has_exit


@dataclass(frozen=True)
class Request:
    """What a mode may build its drafter from."""

    model: Any
    assistant_model: Any | None = None


@dataclass(frozen=True)
class Mode:
    """A way of drafting."""

    name: str
    config: type[SpeculativeConfig]
    build: Callable[[Request, Any], Drafter]
    needs_assistant: bool = False


_modes: dict[str, Mode] = {}


def register_mode(mode: Mode) -> None:
    """Make `speculative_mode=mode.name` available (replacing a mode of that name)."""
    _modes[mode.name] = mode


def mode_names() -> list[str]:
    """Names of the registered modes."""
    return sorted(_modes)


def get_mode(name: Any) -> Mode:
    """The mode of this name. Raises `UnknownModeError`, which lists the known ones."""
    if isinstance(name, type) and issubclass(name, Drafter):
        raise UnknownModeError(
            f"speculative_mode is the class {name.__name__}; pass an object of it: {name.__name__}(...)."
        )
    if not isinstance(name, str) or name not in _modes:
        raise UnknownModeError(
            f"Unknown speculative_mode {name!r}. Known modes: {', '.join(mode_names())}; or pass a Drafter."
        )
    return _modes[name]


def _assistant(request: Request, config: AssistantConfig) -> Drafter:
    if request.assistant_model is None:
        raise ConflictingArgumentsError(
            "speculative_mode='assistant' needs assistant_model=, a smaller model with the same tokenizer."
        )
    return AssistantDrafter(
        request.assistant_model, config, request.model.config.get_text_config(decoder=True).vocab_size
    )


register_mode(Mode("assistant", AssistantConfig, _assistant, needs_assistant=True))


def _early_exit(request: Request, config: EarlyExitConfig) -> Drafter:
    trained = None
    if config.adapter is not None or (config.exit_layer == "auto" and has_exit(request.model)):
        trained = find_exit(request.model, config.adapter)
    return EarlyExitDrafter(request.model, config, trained)


register_mode(Mode("early_exit", EarlyExitConfig, _early_exit))
register_mode(Mode("lookahead", LookaheadConfig, lambda request, config: LookaheadDrafter(config)))
register_mode(
    Mode(
        "medusa",
        MedusaModeConfig,
        lambda request, config: MedusaDrafter(find_heads(request.model, config.adapter), config),
    )
)
register_mode(Mode("prompt_lookup", PromptLookupConfig, lambda request, config: PromptLookupDrafter(config)))
