"""Settings that all modes share, and how those of a mode are checked: types and ranges, when a config is made."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal

from .acceptance import get_rule
from .errors import InvalidSettingError


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings that every mode shares.

    Main arguments:
        num_draft_tokens: tokens to draft per round. `"auto"` lets the controller size every draft by what forwards
            cost here and how often drafts are accepted; a number fixes it, for runs that draft the same every time.
            The output never depends on it.
        acceptance: name of an acceptance rule: `"coupled"` (the text of plain decoding, seed for seed), `"rejection"`
            (arXiv:2211.17192: the same distribution, other draws), `"typical"` (arXiv:2401.10774: LOSSY, the output
            changes), or one of your own (`register_rule`).

    Other arguments:
        max_draft_tokens: most tokens drafted per round under `"auto"`.
        typical_epsilon: threshold of `"typical"`: lower bound on p(x) that always suffices.
        typical_delta: threshold of `"typical"`: factor on exp(-entropy).
        on_unsupported: `"error"` raises where a model, cache or way of generating cannot be sped up exactly;
            `"plain"` warns and decodes plainly.
    """

    num_draft_tokens: int | Literal["auto"] = "auto"
    acceptance: str = "coupled"
    max_draft_tokens: int = 32
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    on_unsupported: Literal["error", "plain"] = "error"

    def __post_init__(self) -> None:
        _check_types(self)
        get_rule(self.acceptance)
        check_range(self, "num_draft_tokens", 0)
        check_range(self, "max_draft_tokens", 0)
        check_range(self, "typical_epsilon", 0.0, 1.0)
        check_range(self, "typical_delta", 0.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ from their defaults, as JSON-able values."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def make_config(kind: type[SpeculativeConfig], settings: Any, mode: str) -> SpeculativeConfig:
    """The mode's config from what the user gave: None, a dict, or the config itself.

    Raises:
        InvalidSettingError: an unknown setting, a wrong type, or another mode's config.
    """
    if settings is None:
        return kind()
    if isinstance(settings, kind):
        return settings
    if isinstance(settings, SpeculativeConfig) or not isinstance(settings, dict):
        raise InvalidSettingError(
            f"speculative_config of mode {mode!r} must be a dict or a {kind.__name__}, got {type(settings).__name__}."
        )
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise InvalidSettingError(
            f"Unknown setting{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))} for mode {mode!r}. "
            f"Known settings: {', '.join(known)}."
        )
    return kind(**settings)


def _check_types(config: SpeculativeConfig) -> None:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(value, hint):
            raise InvalidSettingError(f"{field.name} must be {_spell(hint)}, got {value!r}.")


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint) and isinstance(value, str)
    if typing.get_args(hint):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_args(hint):
        return " or ".join(_spell(option) for option in typing.get_args(hint))
    return {"int": "a whole number", "float": "a number", "bool": "True or False"}.get(hint.__name__, hint.__name__)


def check_range(config: SpeculativeConfig, name: str, low: float, high: float | None = None) -> None:
    """Raise `InvalidSettingError` unless a number lies within these bounds. Words, such as `"auto"`, pass."""
    value = getattr(config, name)
    if isinstance(value, str):
        return
    if not value >= low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidSettingError(f"{name} must be {bounds}, got {value!r}.")
