"""Linear layers that are fast on a few rows, for CPUs.

Verification multiplies every weight of a model with the states of a few tokens. Reading a weight from memory takes
longest there, so that two to eight tokens should cost little more than one. But BLAS libraries are made for large
products: `states @ weight.T` with 2 to 16 rows in float32 can take twice as long as with one, where the same product
from the left, `weight @ states.T`, takes no longer up to 5 rows; a single row goes to `gemv`, which can take twice as
long as two; and some numbers of rows have better kernels than others, so that filling up to one of those pays.
Libraries and machines differ, so what is quickest here is measured on first use. Sums come in another order, so the
last bits differ, as they do between one row and several anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..host.models import execution_device
from ..host.modules import as_type, children, runs_otherwise, with_children

# numbers of rows that are tried from the left; others are filled up to one of them with zeros
_QUICK = (2, 4, 5, 6, 8, 16)
FEW_ROWS = _QUICK[-1]
# the weight that is multiplied to measure, larger than what nearby caches hold, and how often; the best time counts
_TRIED_WEIGHT, _TRIES = (8192, 1024), 3
# part of the straight product's time that a product from the left may take to be preferred
_PREFERRED = 0.95


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear` of `states [..., d]`, in less time for up to 16 rows of float32 on a CPU."""
    rows = states.numel() // states.shape[-1]
    if not 0 < rows <= FEW_ROWS or states.device.type != "cpu" or states.dtype is not torch.float32:
        return functional.linear(states, weight, bias)
    filled = quickest(torch.get_num_threads())[rows]
    if not filled:
        return functional.linear(states, weight, bias)
    few = states.reshape(rows, -1)
    if filled > rows:
        few = functional.pad(few, (0, 0, 0, filled - rows))
    product = weight @ few.T if bias is None else torch.addmm(bias[:, None], weight, few.T)
    return product.T[:rows].contiguous().view(*states.shape[:-1], -1)


@cache
def quickest(threads: int) -> tuple[int, ...]:
    """For 0 to 16 rows, how many to fill up to for a product from the left; 0 where the straight one is as quick.

    Measured in about 0.2 seconds, once for each number of threads that torch uses.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weight = torch.full(_TRIED_WEIGHT, 0.5, dtype=torch.float32, device="cpu")
        states = torch.full((FEW_ROWS, _TRIED_WEIGHT[1]), 0.5, dtype=torch.float32, device="cpu")
        left = {rows: _seconds(lambda few: weight @ few.T, states[:rows]) for rows in _QUICK}
        straight = {rows: _seconds(lambda few: functional.linear(few, weight), states[:rows]) for rows in (1, *_QUICK)}
    found = [0]
    for rows in range(1, FEW_ROWS + 1):
        filled, tried = (min(size for size in sizes if size >= rows) for sizes in (left, straight))
        found.append(filled if left[filled] < _PREFERRED * straight[tried] else 0)
    return tuple(found)


def _seconds(product: Callable[[torch.Tensor], Any], states: torch.Tensor) -> float:
    """The least time that a product of these states took."""
    seconds = []
    for _ in range(_TRIES):
        start = perf_counter()
        product(states)
        seconds.append(perf_counter() - start)
    return min(seconds)


class Linear(nn.Linear):
    """A linear layer that is fast on a few rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def quick_on_few_rows(model: Any) -> Any:
    """The model with such layers in place of its own: modules around them are copied, weights and all else are shared.

    The model itself where there is nothing to gain: on other devices, in other dtypes. Modules whose `forward` was put
    on the object (accelerate's hooks) and compiled ones stay as they are.
    """
    on_cpu = execution_device(model).type == "cpu" and model.dtype is torch.float32
    if not on_cpu or not any(quickest(torch.get_num_threads())):
        return model
    return _quick(model) or model


def _quick(module: nn.Module) -> nn.Module | None:
    """A copy with quick layers, None where there are none inside."""
    if runs_otherwise(module):
        return None
    if type(module) is nn.Linear and type(module.weight) is nn.Parameter:  # others may know no product from the left
        return as_type(module, Linear)
    inside = {name: _quick(inner) for name, inner in children(module).items()}
    quick = {name: inner for name, inner in inside.items() if inner is not None}
    return with_children(module, quick) if quick else None
