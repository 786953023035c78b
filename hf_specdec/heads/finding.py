"""Finding the draft heads of a model."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import AdapterError
from ..host.peft import container_of, is_head_config
from .checks import check_finite
from .kind import HeadKind, head_kinds, kind_of
from .output import lm_head_shape


def find_heads(model: Any, adapter: str | None = None, mode: str | None = None) -> Any:
    """The heads of a model, those of the active adapter unless another is named, with the model they draft for.

    Args:
        model: the base model.
        adapter: name of an adapter.
        mode: only heads that this mode drafts with.

    Returns:
        what the heads' kind binds (`HeadKind.bind`): `BoundHeads`, `BoundExit`, or another `SharedOutput`.

    Raises:
        AdapterError: there are none, they are disabled, or they hold values that are not finite.
    """
    container, name, called = container_of(model), type(model).__name__, _called(mode)
    heads = _of_mode(model, mode)
    if container is None or not heads:
        raise AdapterError(
            f"{name} has no {called}. Load an adapter first: model.load_adapter('org/heads'), or "
            "PeftModel.from_pretrained(model, 'org/heads'); `hf-specdec train-heads` trains one."
        )
    if adapter is None:
        if container.disable_adapters:
            first = next(iter(heads))
            raise AdapterError(f"The adapters of {name} are disabled. Enable them, or name one: adapter={first!r}.")
        active = [other for other in container.active_adapters if other in heads]
        if not active and container.active_adapters and len(heads) == 1:
            active = list(heads)  # the active one is of another kind
        if len(active) != 1:
            raise AdapterError(
                f"{name} has the adapters {', '.join(map(repr, heads))}, and {len(active) or 'none'} of them active. "
                'Name one: speculative_config={"adapter": ...}.'
            )
        adapter = active[0]
    if adapter not in heads:
        raise AdapterError(f"{name} has no {called} {adapter!r}, but {', '.join(map(repr, heads))}.")
    config = getattr(model, "peft_config", {}).get(adapter)
    if not is_head_config(config):
        raise AdapterError(
            f"What {name} knows of the {called} {adapter!r} is gone: another adapter has taken that name, or was "
            "merged. Load the model anew, and each adapter under a name of its own."
        )
    _check_sound(heads[adapter], config, model, adapter)
    return kind_of(config).bind(heads[adapter], config, model)


def has_heads(model: Any, mode: str | None = None) -> bool:
    """Whether a model has heads that a mode drafts with (any, if None), sound or not, and its adapters are enabled."""
    container = container_of(model)
    return container is not None and not container.disable_adapters and bool(_of_mode(model, mode))


def _kinds(mode: str | None) -> list[HeadKind]:
    return [kind for kind in head_kinds() if mode is None or kind.mode == mode]


def _called(mode: str | None) -> str:
    names = dict.fromkeys(kind.called for kind in _kinds(mode))
    return "draft heads" if mode is None or not names else " or ".join(names)


def _of_mode(model: Any, mode: str | None) -> dict[str, Any]:
    """Name of an adapter -> its weights, for heads that a mode drafts with."""
    container = container_of(model)
    if container is None:
        return {}
    types = dict.fromkeys(kind.config.type_name for kind in _kinds(mode))
    return {adapter: heads for name in types for adapter, heads in container.heads(name).items()}


@torch.no_grad()
def _check_sound(heads: Any, config: Any, model: Any, adapter: str) -> None:
    """Raise `AdapterError` unless weights are whole, and the model is still the one that they were loaded for."""
    check_finite(dict(heads.named_parameters()), adapter)
    vocab_size, hidden_size = lm_head_shape(model)
    highest = -1 if heads.token_map is None else int(heads.token_map.max())
    if config.has_own_outputs and heads.token_map is None:
        highest = (config.vocab_size or 0) - 1
    if config.hidden_size != hidden_size or highest >= vocab_size:
        raise AdapterError(
            f"The heads {adapter!r} draft tokens up to {highest} from a hidden size of {config.hidden_size}; "
            f"{type(model).__name__} has {vocab_size} tokens and {hidden_size} now. Load heads for the model as it is."
        )
