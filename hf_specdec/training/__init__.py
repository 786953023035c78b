"""Training draft heads by self-distillation, and evaluating them."""

from .data import DataSettings
from .evaluate import Evaluation, evaluate_heads
from .prompts import read_chats
from .settings import TrainingReport, TrainingSettings
from .train import train_heads

__all__ = [
    "DataSettings",
    "Evaluation",
    "TrainingReport",
    "TrainingSettings",
    "evaluate_heads",
    "read_chats",
    "train_heads",
]
