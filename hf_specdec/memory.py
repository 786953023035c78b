"""What was found out about models: kept for as long as they live, for the state in which it was found."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .host.models import attention_of, execution_device, plain_settings, text_config
from .host.modules import changes_of_forwards

Found = TypeVar("Found")

_known: WeakKeyDictionary[nn.Module, dict[str, OrderedDict[Hashable, Any]]] = WeakKeyDictionary()
_lock = threading.Lock()


def state_of(model: Any) -> tuple:
    """What a finding about a model may depend on; another state asks for another test.

    Settings of its config, attention back end, dtype, autocast, device, number of threads; of its modules the classes,
    whether they are in training mode, adapters, hooks, and forwards put on them. What a hook itself remembers cannot be
    seen.
    """
    config, device = text_config(model), execution_device(model)
    return (
        attention_of(config),
        plain_settings(config),
        model.dtype,
        str(device),
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
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
