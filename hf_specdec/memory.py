"""What was found out about models: kept for as long as they live, for the state in which it was found."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .host.models import attention_of, text_config
from .host.modules import changes_of_forwards

Found = TypeVar("Found")

_known: WeakKeyDictionary[nn.Module, dict[str, OrderedDict[Hashable, Any]]] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> tuple:
    """What a finding about a model may depend on; another state asks for another test.

    Attention back end, dtype, device, mode, number of threads, adapters, hooks, and forwards put on its modules.
    """
    return (
        attention_of(text_config(model)),
        model.dtype,
        str(model.device),
        model.training,
        torch.get_num_threads(),
        changes_of_forwards(model),
    )


def remembered(module: nn.Module, kind: str, key: Hashable, find: Callable[[], Found], *, most: int = 64) -> Found:
    """What `find` found the first time it was asked for this `kind` and `key` of a module.

    Args:
        module: a model, or a part of one.
        kind: what was found out.
        key: what it depends on, for instance `state_of(model)`.
        find: finds it out. It may remember other findings; what it raises is not remembered.
        most: findings of this kind that are kept, the latest used: hooks that come and go make a new state each time.
    """
    with _lock:
        findings = _known.setdefault(module, {}).setdefault(kind, OrderedDict())
        if key in findings:
            findings.move_to_end(key)
            return findings[key]
    found = find()
    with _lock:
        # where two threads found it out at the same time, both go on with the same answer
        found = findings.setdefault(key, found)
        while len(findings) > most:
            findings.popitem(last=False)
    return found


def forget(module: nn.Module, kind: str | None = None) -> None:
    """Forget what was found out about a module, all of it or one kind."""
    with _lock:
        if kind is None:
            _known.pop(module, None)
        else:
            _known.get(module, {}).pop(kind, None)
