"""What PEFT puts on a model for one call of `generate`. It need not be imported for that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

# the functions that PEFT's hooks call, and what asks for them
_ASKED_BY = {
    "_adapter_names_pre_forward_hook": "adapter_names (an adapter for each row)",
    "_alora_offsets_pre_forward_hook": "an activated LoRA (alora_invocation_tokens)",
}


def _hooks(model: Any) -> Iterator[tuple[Any, int, str]]:
    """(dictionary of hooks, key in it, name of the function)."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key, hook in list(hooks.items()) if hooks else ():
            name = getattr(hook.func, "__name__", "") if isinstance(hook, partial) else ""
            if name in _ASKED_BY:
                yield hooks, key, name


def asks_for_rows_or_offsets(model: Any) -> str | None:
    """What asked for hooks that hold for the prompts as they came, row by row or up to an offset; None: nothing."""
    return next((_ASKED_BY[name] for _, _, name in _hooks(model)), None)


def remove_hooks_of_call(model: Any) -> None:
    """Take PEFT's hooks of a call off, which it leaves on after an exception, so that no later call would run."""
    for hooks, key, _ in list(_hooks(model)):
        hooks.pop(key, None)
