"""Draft heads that are trained beside a model and travel as PEFT adapters."""

from .config import MedusaConfig
from .model import MedusaModel, find_heads
from .module import BoundHeads, MedusaHeads

__all__ = ["BoundHeads", "MedusaConfig", "MedusaHeads", "MedusaModel", "find_heads"]
