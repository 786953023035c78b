"""What the formulas of `analysis` accept: each check returns the value it asks for, or raises `AnalysisError`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import AnalysisError


def as_number(name: str, value: Any, allowed: str, inside: Callable[[float], bool]) -> float:
    """`value` as a float where `inside` holds, which it must not for NaN."""
    if not isinstance(value, (bool, str, bytes, bytearray)):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            if inside(number):
                return number
    raise AnalysisError(f"{name} must be {allowed}, got {value!r}")


def as_probability(name: str, value: Any) -> float:
    """A number in [0, 1]. Raises `AnalysisError` for anything else."""
    return as_number(name, value, "a number in [0, 1]", lambda x: 0 <= x <= 1)


def as_cost_ratio(value: Any) -> float:
    """Seconds of a draft forward over those of a target forward. Raises `AnalysisError` for anything else."""
    return as_number("cost_ratio", value, "a finite number >= 0", lambda x: 0 <= x < math.inf)


def as_verify_cost(name: str, value: Any) -> float:
    """What a verification costs, in plain steps. Raises `AnalysisError` for anything else."""
    return as_number(name, value, "a finite number > 0", lambda x: 0 < x < math.inf)


def as_integer(name: str, value: Any, low: int = 0) -> int:
    """`value` as an int >= `low`; any integer type will do, but a bool is a slip."""
    if not isinstance(value, bool):
        try:
            integer = operator.index(value)
        except TypeError:
            pass
        else:
            if integer >= low:
                return integer
    raise AnalysisError(f"{name} must be an integer >= {low}, got {value!r}")


def as_items(name: str, values: Any) -> tuple[Any, ...]:
    """The values of a sequence. Raises `AnalysisError` for anything else."""
    # Iterating a mapping would read its keys as its values.
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise AnalysisError(f"{name} must be a sequence, got {type(values).__name__} {values!r}")
    return tuple(values)


def as_counts(histogram: Any) -> tuple[int, ...]:
    """A histogram as whole numbers. Raises `AnalysisError` for anything else."""
    items = as_items("histogram", histogram)
    if not items:
        raise AnalysisError("histogram must have at least one entry (rounds that accepted 0 tokens), got none")
    return tuple(as_integer(f"histogram[{k}]", count) for k, count in enumerate(items))
