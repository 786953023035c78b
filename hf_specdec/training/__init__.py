"""Training draft heads by self-distillation, and evaluating them."""

from .data import DataSettings
from .evaluate import Evaluation, ExitEvaluation, evaluate_exit, evaluate_heads
from .prompts import read_prompts
from .settings import TrainingReport, TrainingSettings
from .train import train_heads

__all__ = [
    "DataSettings",
    "Evaluation",
    "ExitEvaluation",
    "TrainingReport",
    "TrainingSettings",
    "evaluate_exit",
    "evaluate_heads",
    "read_prompts",
    "train_heads",
]
