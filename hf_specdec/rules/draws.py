"""The only two ways in which a rule is random."""

from __future__ import annotations

import torch


def coin(probability: float, device: torch.device) -> bool:
    """True with this probability."""
    return float(torch.rand((), device=device)) < probability


def token(p: torch.Tensor) -> int:
    """A token from `p [V]`."""
    return int(torch.multinomial(p, 1))
