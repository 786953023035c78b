"""Copies of a model's shells: what is inside can be exchanged, and the model does not notice."""

from __future__ import annotations

from typing import Any


def shell(module: Any) -> Any:
    """A copy of a module whose submodules can be exchanged without the original's noticing."""
    copy: Any = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    # what is put on the object is bound to the original, layers and all: hooks' forwards, compiled calls
    for bound in ("forward", "_compiled_call_impl"):
        copy.__dict__.pop(bound, None)
    # transformers hooks a model at the first request for its hidden states; these layers are not the shell's to hook
    copy.__dict__["_output_capturing_hooks_installed"] = True
    return copy
