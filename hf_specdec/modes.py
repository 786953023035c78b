"""The modes by name, and a mode as the default of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig

from .config import SpeculativeConfig, make_config
from .drafter import Drafter
from .errors import ConfigurationError, UnknownModeError
from .host.generate import keep_own_entries

# asks for plain decoding
NO_MODE = "none"


@dataclass(frozen=True)
class Request:
    """What a mode may build its drafter from."""

    model: Any
    assistant_model: Any | None = None


@dataclass(frozen=True)
class Mode:
    """A way of drafting: `speculative_mode=name`."""

    name: str
    config: type[SpeculativeConfig]
    build: Callable[[Request, Any], Drafter]
    # whether it takes `assistant_model=`; for any other mode the argument is an error
    needs_assistant: bool = False
    # where it cannot draft for encoder-decoder models: why
    decoder_only: str | None = None
    # where it drafts with heads that are loaded as an adapter: the kind (`HeadKind.name`) that the conformance suite
    # gives it
    needs_heads: str | None = None
    # settings with which the conformance suite can expect drafts from it on models of three layers
    conformance: Mapping[str, Any] = field(default_factory=dict)


_modes: dict[str, Mode] = {}


def register_mode(mode: Mode) -> None:
    """Make `speculative_mode=mode.name` available (replacing a mode of that name).

    Raises:
        ConfigurationError: its name is none, or its config is no `SpeculativeConfig`.
    """
    if not isinstance(mode.name, str) or not mode.name or mode.name == NO_MODE:
        raise ConfigurationError(f"A mode cannot be called {mode.name!r}; choose another name.")
    if not isinstance(mode.config, type) or not issubclass(mode.config, SpeculativeConfig):
        raise ConfigurationError(f"The config of mode {mode.name!r} must be a subclass of SpeculativeConfig.")
    _modes[mode.name] = mode


def unregister_mode(name: str) -> None:
    """Take a mode away again. Raises `UnknownModeError` where there is none of this name."""
    get_mode(name)
    del _modes[name]


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
        nearest = get_close_matches(str(name), mode_names(), n=1)
        meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
        known = ", ".join([*mode_names(), NO_MODE])
        raise UnknownModeError(f"Unknown speculative_mode {name!r}.{meant} Known modes: {known}; or pass a Drafter.")
    return _modes[name]


def configure(target: Any, mode: str | None, config: dict[str, Any] | SpeculativeConfig | None = None) -> None:
    """Make a mode the default of a model or a `GenerationConfig`, so that it is saved with it.

    Args:
        target: a model (its `generation_config` is replaced by a copy that carries the mode) or a `GenerationConfig`
            (changed in place).
        mode: name of the mode; None removes it again.
        config: settings, a dict or the mode's config.

    Raises:
        UnknownModeError, InvalidSettingError: before anything is changed.
    """
    settings: dict[str, Any] | None = None
    if mode is not None:
        settings = make_config(get_mode(mode).config, config, mode).to_dict()
    generation_config = target
    if not isinstance(target, GenerationConfig):
        generation_config = copy.deepcopy(target.generation_config)
    for name, value in (("speculative_mode", mode), ("speculative_config", settings or None)):
        if value is not None:
            setattr(generation_config, name, value)
        elif hasattr(generation_config, name):
            delattr(generation_config, name)  # without this package an entry would be silently ignored
    keep_own_entries(generation_config)
    if generation_config is not target:
        target.generation_config = generation_config
