"""Copies of modules, and what was put on them: hooks, forwards, compiled calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

# forwards that were seen, numbered
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_counter = count()
# the hooks of a module that can change what its forward computes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def without_children(module: Any) -> Any:
    """A copy of a module, sharing weights and hooks, whose submodules can be exchanged unnoticed by the original."""
    copy: Any = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    # what is put on the object is bound to the original, layers and all: hooks' forwards, compiled calls
    for bound in ("forward", "_compiled_call_impl"):
        copy.__dict__.pop(bound, None)
    # transformers hooks a model at the first request for its hidden states; these layers are not the copy's to hook
    copy.__dict__["_output_capturing_hooks_installed"] = True
    return copy


def with_children(module: Any, children: Mapping[str, nn.Module]) -> Any:
    """A copy of a module, sharing all but these submodules."""
    copy = without_children(module)
    copy.__dict__["_modules"].update(children)
    return copy


def as_type(module: nn.Module, kind: type[nn.Module]) -> Any:
    """The module as another class, sharing everything it has."""
    copy: Any = object.__new__(kind)
    copy.__dict__.update(module.__dict__)
    return copy


def runs_otherwise(module: nn.Module) -> bool:
    """Whether a call runs something else than the forward of the module's class: one put on the object, or compiled."""
    return "forward" in module.__dict__ or module._compiled_call_impl is not None


def watching_hook(module: nn.Module, hook: Callable[..., None], *, before: bool = False) -> RemovableHandle:
    """Let `hook` look at what comes out of a module, or goes into it. It changes nothing.

    Args:
        module: the module.
        hook: called with module, arguments and output, or, `before` the forward, with module, arguments and keywords.
        before: when it is called.
    """
    hook._specdec_watches = True  # type: ignore[attr-defined]
    if before:
        return module.register_forward_pre_hook(hook, with_kwargs=True)
    return module.register_forward_hook(hook)


def changes_of_forwards(model: Any) -> tuple:
    """What can change the forward of a model's modules; equal only where nothing changed between.

    Hooks that only watch are left out: other threads put them on and take them off at any time.
    """
    found: list[tuple] = [tuple(hooks) for hooks in (_global_forward_hooks, _global_forward_pre_hooks)]
    module: Any
    for index, module in enumerate(model.modules()):
        kind = type(module)
        found.append((kind, module.training, _number_of(kind.forward)))
        if "forward" in module.__dict__:
            found.append((index, _number_of(module.__dict__["forward"])))
        for name in _HOOKS:
            hooks = module.__dict__[name]
            if hooks:
                # (a list first: another thread may change the dictionary)
                found += [(index, name, number) for number, hook in list(hooks.items()) if not _watches(hook)]
        # PEFT's layers; models of transformers have a method of that name
        if isinstance(getattr(type(module), "active_adapters", None), property):
            found.append((index, tuple(module.active_adapters), bool(module.disable_adapters)))
    return tuple(found)


def _number_of(function: Any) -> tuple:
    """Differs between two functions, also where the second came to lie where the first has been."""
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    try:
        number = _numbers.get(function)
        if number is None:
            number = _numbers.setdefault(function, next(_counter))
    except TypeError:  # neither hashable nor weakly referable
        number = id(function)
    return number, id(owner)


def _watches(hook: Any) -> bool:
    return getattr(hook, "_specdec_watches", False)


def child(module: nn.Module, name: str) -> Any:
    """A submodule by name, as it is registered."""
    return module._modules[name]


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules by name."""
    return {name: inner for name, inner in module._modules.items() if inner is not None}
