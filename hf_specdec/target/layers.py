"""Where the layers of a model are, and copies of it with other ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from ..host.models import text_config
from ..host.modules import child, with_children


def find_layers(model: Any) -> tuple[tuple[str, ...], Sequence[nn.Module]]:
    """Where the model's list of layers is, and its layers.

    Raises:
        UnsupportedModelError: there is no such list, or more than one.
    """
    count = text_config(model).num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    depth = min((name.count(".") for name, _ in found), default=0)
    outermost = [(name, module) for name, module in found if name.count(".") == depth]
    if len(outermost) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {'no list' if not found else 'several lists'} of {count} layers, so its "
            "layers cannot be run by themselves. Use another speculative_mode."
        )
    name, layers = outermost[0]
    return tuple(name.split(".")), list(layers)


def with_layers(model: Any, path: Sequence[str], layers: Sequence[nn.Module]) -> Any:
    """The model with other layers: the modules around them are copied, their weights and all else are shared."""
    if len(path) == 1:
        return with_children(model, {path[0]: nn.ModuleList(layers)})
    inner = with_layers(child(model, path[0]), path[1:], layers)
    return with_children(model, {path[0]: inner})
