"""Linear layers that are quick on a few rows, for CPUs.

Verification multiplies every weight of a model with the states of a few tokens. Reading a weight from memory takes
longest there, so that two to eight tokens should cost little more than one. But BLAS libraries are made for large
products: `states @ weight.T` with 2 to 16 rows in float32 takes up to twice as long as with one, where the same product
from the left, `weight @ states.T`, takes no longer up to 5 rows. A single row goes to `gemv`, which can take twice as
long as a product with two. And some numbers of rows have better kernels than others, so rows are filled up to the next
of those. Sums come in another order, so the last bits differ, as they do between one row and several anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .shells import shell

# numbers of rows that are multiplied from the left; others in between are filled up with zeros
_QUICK = (2, 4, 5, 6, 8, 16)
FEW_ROWS = _QUICK[-1]


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear` of `states [..., d]`, in less time for up to 16 rows of float32 on a CPU."""
    rows = states.numel() // states.shape[-1]
    if not 0 < rows <= FEW_ROWS or states.device.type != "cpu" or states.dtype is not torch.float32:
        return functional.linear(states, weight, bias)
    filled = functional.pad(states.reshape(rows, -1), (0, 0, 0, _QUICK[bisect_left(_QUICK, rows)] - rows))
    product = weight @ filled.T if bias is None else torch.addmm(bias[:, None], weight, filled.T)
    return product.T[:rows].contiguous().view(*states.shape[:-1], -1)


class Linear(nn.Linear):
    """A linear layer that is quick on a few rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def quick_on_few_rows(model: Any) -> Any:
    """The model with such layers in place of its own: shells are copied, weights and all else are shared.

    The model itself where there is nothing to gain: on other devices, in other dtypes. Modules whose `forward` was put
    on the object (accelerate's hooks, compiled ones) stay as they are.
    """
    if model.device.type != "cpu" or model.dtype is not torch.float32:
        return model
    return _quick(model) or model


def _quick(module: nn.Module) -> nn.Module | None:
    """A copy with quick layers, None where there are none inside."""
    if "forward" in module.__dict__:
        return None
    if type(module) is nn.Linear:
        copy = object.__new__(Linear)
        copy.__dict__.update(module.__dict__)
        return copy
    inside = {name: _quick(child) for name, child in module._modules.items() if child is not None}
    if not any(child is not None for child in inside.values()):
        return None
    copy = shell(module)
    copy.__dict__["_modules"].update({name: child for name, child in inside.items() if child is not None})
    return copy
