"""Draft heads that are trained beside a model and travel as PEFT adapters."""

from .config import MedusaConfig
from .exit import BoundExit, TrainedExit
from .model import MedusaModel, find_exit, find_heads, has_exit
from .module import BoundHeads, MedusaHeads

__all__ = [
    "BoundExit",
    "BoundHeads",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaModel",
    "TrainedExit",
    "find_exit",
    "find_heads",
    "has_exit",
]
