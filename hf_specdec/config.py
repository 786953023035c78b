"""Settings: one dataclass per mode, checked when made, and their place on a `GenerationConfig`."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal

from .errors import InvalidSettingError

Acceptance = Literal["coupled", "rejection", "typical"]


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings that every mode shares.

    Main arguments:
        num_draft_tokens: tokens to draft a round. `"auto"` lets the controller size every draft by what forwards
            cost here and how often drafts are accepted; a number fixes it, for runs that draft the same every time.
            The output never depends on it.
        acceptance: `"coupled"` (the text of plain decoding, seed for seed), `"rejection"` (arXiv:2211.17192: the same
            distribution, other draws) or `"typical"` (arXiv:2401.10774: LOSSY, the output changes).

    Other arguments:
        max_draft_tokens: most tokens drafted a round under `"auto"`.
        typical_epsilon: threshold of `"typical"`: lower bound on p(x) that always suffices.
        typical_delta: threshold of `"typical"`: factor on exp(-entropy).
        on_unsupported: `"error"` raises where a model, cache or way of generating cannot be sped up exactly;
            `"plain"` warns and decodes plainly.
    """

    num_draft_tokens: int | Literal["auto"] = "auto"
    acceptance: Acceptance = "coupled"
    max_draft_tokens: int = 32
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    on_unsupported: Literal["error", "plain"] = "error"

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range(self, "num_draft_tokens", 0)
        _check_range(self, "max_draft_tokens", 0)
        _check_range(self, "typical_epsilon", 0.0, 1.0)
        _check_range(self, "typical_delta", 0.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ from their defaults, as JSON-able values."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(SpeculativeConfig):
    """Settings of `prompt_lookup`.

    Args:
        min_match_length: shortest suffix of the text that is looked up in it.
        max_match_length: longest suffix whose length still tells matches apart.
    """

    min_match_length: int = 1
    max_match_length: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "min_match_length", 1)
        _check_range(self, "max_match_length", self.min_match_length)


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(SpeculativeConfig):
    """Settings of `assistant`.

    Args:
        draft_sampling: when the target samples, `"tape"` lets the draft model read the target's own noise, so that
            both pick the same token as often as can be (arXiv:2408.07978); `"greedy"` takes its argmax.
        max_vocabulary_padding: most entries by which the two vocabularies may differ and still be the same
            vocabulary padded to different sizes.
    """

    draft_sampling: Literal["tape", "greedy"] = "tape"
    max_vocabulary_padding: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "max_vocabulary_padding", 0)


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(SpeculativeConfig):
    """Settings of `lookahead`. The window adds (ngram_size - 1) * window_size - 1 nodes to every forward.

    Args:
        window_size: W, columns of the Jacobi window; 0 leaves it out, so that n-grams come from the text alone.
            `"auto"` takes what the measured cost of a forward allows, which may be none.
        ngram_size: N; n-grams hold N tokens, so a draft is at most N - 1 deep.
        guess_set_size: G, most n-grams kept, and drafted at once, for a first token.
    """

    window_size: int | Literal["auto"] = "auto"
    ngram_size: int = 5
    guess_set_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "window_size", 0)
        _check_range(self, "ngram_size", 2)
        _check_range(self, "guess_set_size", 1)


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(SpeculativeConfig):
    """Settings of `early_exit`.

    Args:
        exit_layer: E, the number of layers that draft. `"auto"` takes the exit that a loaded adapter was trained for;
            else it measures on the prompts how well a few exits agree with the model and takes the one that promises
            most, or none.
        adapter: name of the adapter with a trained exit; None takes the active one, if there is one.
        num_alternatives: tokens drafted beside the likeliest one at every depth; 0 drafts chains.
        draft_sampling: when the target samples, `"tape"` lets the exit read the target's own noise, so that both pick
            the same token as often as can be (arXiv:2408.07978); `"greedy"` takes its argmax.
    """

    exit_layer: int | Literal["auto"] = "auto"
    adapter: str | None = None
    num_alternatives: int = 1
    draft_sampling: Literal["tape", "greedy"] = "tape"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "exit_layer", 1)
        _check_range(self, "num_alternatives", 0)


@dataclass(frozen=True, kw_only=True)
class MedusaModeConfig(SpeculativeConfig):
    """Settings of `medusa`. (Those of the heads themselves are `heads.MedusaConfig`.)

    Args:
        adapter: name of the adapter whose heads draft; None takes the active one.
        tree: a static tree, as a list of rank paths: `[[0], [1], [0, 0]]` is the best and the second best token of
            the first head, and below the best one the best of the second. It is drafted whole, every round, and sets
            num_draft_tokens. None grows the likeliest tree anew every round.
        max_children: most tokens tried below a node of a tree that grows.
        prompt_lookup: whether a tree that grows also holds what followed the current suffix earlier in the text, as in
            mode `prompt_lookup`. It costs next to nothing, and heads cannot look back.
        draft_sampling: when the target samples, `"tape"` ranks candidates over the target's own noise, so that the
            token it will pick tends to come first (arXiv:2408.07978); `"greedy"` ranks them by probability.
    """

    adapter: str | None = None
    tree: list | tuple | None = None
    max_children: int = 10
    prompt_lookup: bool = True
    draft_sampling: Literal["tape", "greedy"] = "tape"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "max_children", 1)
        if self.tree is not None:
            _check_rank_paths(self.tree)
            if self.num_draft_tokens not in ("auto", len(self.tree)):
                raise InvalidSettingError(
                    f"tree has {len(self.tree)} nodes, so num_draft_tokens cannot be {self.num_draft_tokens}. Leave it "
                    "out."
                )
            object.__setattr__(self, "num_draft_tokens", len(self.tree))


def _check_rank_paths(tree: Any) -> None:
    paths = {
        tuple(path)
        for path in tree
        if isinstance(path, (list, tuple)) and all(type(rank) is int and 0 <= rank < 1000 for rank in path)
    }
    if not paths or len(paths) != len(tree) or () in paths:
        raise InvalidSettingError(
            "tree must be a list of different rank paths, each a list of whole numbers such as [0, 1]."
        )
    orphans = [list(path) for path in sorted(paths) if len(path) > 1 and path[:-1] not in paths]
    if orphans:
        raise InvalidSettingError(f"tree holds {orphans[0]} but not the path above it, {orphans[0][:-1]}.")


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
    import copy

    from transformers import GenerationConfig

    from .modes import get_mode

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
    # transformers drops custom entries on reload from a config it derived from the model's own
    generation_config._from_model_config = False
    if generation_config is not target:
        target.generation_config = generation_config


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


def _check_range(config: SpeculativeConfig, name: str, low: float, high: float | None = None) -> None:
    value = getattr(config, name)
    if isinstance(value, str):
        return
    if not value >= low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidSettingError(f"{name} must be {bounds}, got {value!r}.")
