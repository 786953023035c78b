"""How heads are trained, and what is noted down of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..heads.config import DTYPES

PROVENANCE = "training.json"


@dataclass(frozen=True)
class TrainingSettings:
    """How heads are trained. Batches are counted in positions.

    Args:
        epochs: times that every position is seen.
        batch_size: positions per step.
        learning_rate: highest, after a warm-up of 5 % of the steps; falls to zero along a cosine.
        weight_decay: of AdamW.
        head_decay: the loss of head k, counted from 1, counts `head_decay**(k - 1)`.
        feature_weight: weight of the distance between a head's state and the hidden state it stands for.
        eval_part: part of the prompts that is held out.
        max_positions: most positions of answers made; None makes all.
        dtype: of the saved weights.
        bf16: whether to train in mixed precision.
        seed: of the order of the positions.
    """

    epochs: float = 3.0
    batch_size: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    head_decay: float = 0.8
    feature_weight: float = 1.0
    eval_part: float = 0.05
    max_positions: int | None = None
    dtype: str = "bfloat16"
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "head_decay"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, got {getattr(self, name)}.")
        if not 0 < self.eval_part < 1:
            raise ConfigurationError(f"eval_part must lie between 0 and 1, got {self.eval_part}.")
        if self.max_positions is not None and self.max_positions < 1:
            raise ConfigurationError(f"max_positions must be at least 1, got {self.max_positions}.")
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")


@dataclass
class TrainingReport:
    """What came of a training; written beside the weights as `training.json`."""

    base: str
    kind: str
    data: list[str]
    positions: int
    held_out_positions: int
    # of every head, on the held-out prompts: {"loss": ..., "top1": ..., "top10": ...}
    heads: list[dict[str, float]]
    data_seconds: float
    training_seconds: float
    data_settings: dict[str, Any]
    training_settings: dict[str, Any]
    versions: dict[str, str]
    machine: str
    command: str | None = None
    # what else is to be said of it
    note: str | None = None
    # whether training went on from a checkpoint; then its seconds are those of the last start
    resumed: bool = False
