"""`MedusaConfig`: what an adapter of Medusa heads looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...errors import InvalidSettingError
from ..config import HeadConfig, check_flag, check_whole

HEAD_TYPES = ("independent", "sequential")
# larger ones are no heads but an attempt to fill the memory
_MOST = {"num_heads": 32, "num_layers": 16}


@dataclass
class MedusaConfig(HeadConfig):
    """Settings of Medusa heads (arXiv:2401.10774), as a PEFT method.

    Main arguments:
        num_heads: H, heads; head k, counted from 1, predicts the token k + 1 positions on, so a draft is at most H
            tokens deep.
        num_layers: residual blocks of a head.
        head_type: `"independent"` (Medusa: every head sees the last hidden state alone) or `"sequential"` (Hydra,
            arXiv:2402.05109: a head goes on from the head before it and also sees the token drafted there).
        tied_heads: of sequential heads: whether all heads are one and the same, asked again and again (ReDrafter,
            arXiv:2403.09919): a fraction of the weights, which learn from every place ahead.
        own_lm_head: whether every head has an output layer of its own; otherwise they share the model's.

    Other arguments: see `HeadConfig`.

    Raises:
        InvalidSettingError: a setting is of the wrong type or out of range.
    """

    type_name: ClassVar[str] = "MEDUSA"

    num_heads: int = field(default=4, metadata={"help": "heads: most tokens a draft is deep", "option": "N"})
    num_layers: int = field(default=1, metadata={"help": "residual blocks of a head", "option": "N"})
    head_type: str = field(default="independent", metadata={"help": "'independent' or 'sequential'."})
    tied_heads: bool = field(
        default=False, metadata={"help": "one sequential head for all places (ReDrafter)", "option": None}
    )
    own_lm_head: bool = field(default=False, metadata={"help": "give every head an LM head of its own", "option": None})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in _MOST.items():
            check_whole(self, name, most)
        if self.head_type not in HEAD_TYPES:
            raise InvalidSettingError(
                f"head_type must be {' or '.join(map(repr, HEAD_TYPES))}, got {self.head_type!r}."
            )
        for name in ("own_lm_head", "tied_heads"):
            check_flag(self, name)
        if self.own_lm_head and self.output_rank is not None:
            raise InvalidSettingError("output_rank: heads with own_lm_head=True share no output layer.")
        if self.tied_heads and self.head_type != "sequential":
            raise InvalidSettingError("tied_heads: only heads of head_type='sequential' can all be the same.")
        if self.tied_heads and self.own_lm_head:
            raise InvalidSettingError("own_lm_head: tied heads share their output layer too.")

    @property
    def has_own_outputs(self) -> bool:
        return self.own_lm_head or super().has_own_outputs
