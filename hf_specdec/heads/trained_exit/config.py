"""`TrainedExitConfig`: what an adapter with a trained exit looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..config import HeadConfig, check_whole


@dataclass
class TrainedExitConfig(HeadConfig):
    """Settings of a trained exit (Kangaroo, arXiv:2404.18911), as a PEFT method.

    Main arguments:
        exit_layer: E, the number of the base model's layers below the exit; it has no default.

    Other arguments: see `HeadConfig`.

    Raises:
        InvalidSettingError: a setting is of the wrong type or out of range.
    """

    type_name: ClassVar[str] = "TRAINED_EXIT"

    # (PEFT wants a default of every setting; this one is refused)
    exit_layer: int = field(default=0, metadata={"help": "the layers below the exit; must be given", "option": "E"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "exit_layer")
