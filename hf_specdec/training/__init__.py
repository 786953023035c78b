"""Training draft heads by self-distillation."""

from .data import DataSettings, read_prompts
from .settings import TrainingReport, TrainingSettings
from .train import train_heads

__all__ = ["DataSettings", "TrainingReport", "TrainingSettings", "read_prompts", "train_heads"]
