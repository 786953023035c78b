"""`MedusaConfig`: what an adapter of draft heads looks like, as PEFT saves it in `adapter_config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from ..errors import InvalidSettingError

HEAD_TYPES = ("independent", "sequential", "exit")
DTYPES = ("float32", "bfloat16", "float16")
# larger ones are no heads but an attempt to fill the memory
_MOST = {"num_heads": 32, "num_layers": 16}


@dataclass
class MedusaConfig(PeftConfig):
    """Settings of Medusa heads (arXiv:2401.10774), as a PEFT method.

    Main arguments:
        num_heads: heads; head k predicts the token k + 2 positions on, so a draft is at most so deep.
            A trained exit has none.
        num_layers: residual blocks of a head.
        head_type: `"independent"` (Medusa: every head sees the last hidden state alone), `"sequential"` (Hydra,
            arXiv:2402.05109: a head goes on from the head before it and also sees the token drafted there), or `"exit"`
            (Kangaroo, arXiv:2404.18911: a single decoder layer on the hidden state at an early exit, for mode
            `early_exit`).
        tied_heads: of sequential heads: whether all heads are one and the same, asked again and again (ReDrafter,
            arXiv:2403.09919): a fraction of the weights, which learn from every place ahead.
        draft_vocab_size: tokens that the heads can draft (FR-Spec, arXiv:2502.14856); None takes all. Which ones is
            the `token_map` among the weights: the first so many until training or conversion chooses better.
        exit_layer: of `"exit"`: E, the number of the base model's layers below it.
        own_lm_head: whether every head has an output layer of its own; otherwise they share the model's.
        output_rank: r, of an output layer of the adapter's own that all its heads share, two factors of width r: far
            cheaper to read than the model's LM head, which None shares.

    Other arguments:
        dtype: of the heads' weights; None takes the model's, but float32 for half precision on a CPU.

    Filled in when the heads are made:
        hidden_size, vocab_size: of the base model.
        base_probe: a few weights of the base model's embedding, by which it is known again.
        provenance: how they were trained and what was measured, for the model card.

    Raises:
        InvalidSettingError: a setting is of the wrong type or out of range.
    """

    num_heads: int = field(default=4, metadata={"help": "Number of heads."})
    num_layers: int = field(default=1, metadata={"help": "Residual blocks of a head."})
    head_type: str = field(default="independent", metadata={"help": "'independent', 'sequential' or 'exit'."})
    tied_heads: bool = field(default=False, metadata={"help": "Whether all sequential heads are one and the same."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Tokens that the heads can draft."})
    exit_layer: int | None = field(default=None, metadata={"help": "Layers of the base model below a trained exit."})
    own_lm_head: bool = field(default=False, metadata={"help": "Whether the heads have output layers of their own."})
    output_rank: int | None = field(default=None, metadata={"help": "Rank of an output layer that the heads share."})
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "dtype of the weights; None takes the base model's, but float32 for half precision on a CPU."
        },
    )
    hidden_size: int | None = field(default=None, metadata={"help": "Hidden size of the base model."})
    vocab_size: int | None = field(default=None, metadata={"help": "Vocabulary of the base model."})
    base_probe: list[float] | None = field(default=None, metadata={"help": "A few weights of the base model."})

    provenance: dict[str, Any] | None = field(default=None, metadata={"help": "How they were trained and measured."})

    def __post_init__(self) -> None:
        super().__post_init__()
        from .model import PEFT_TYPE

        self.peft_type = PEFT_TYPE
        if self.task_type is None:
            self.task_type = "CAUSAL_LM"
        whole = (
            "num_heads",
            "num_layers",
            "draft_vocab_size",
            "output_rank",
            "exit_layer",
            "hidden_size",
            "vocab_size",
        )
        for name in whole:
            value = getattr(self, name)
            if value is None and name not in _MOST:
                continue
            most = _MOST.get(name, 2**31)
            if not _is_whole(value) or not 1 <= value <= most:
                raise InvalidSettingError(
                    f"{name} of draft heads must be a whole number from 1 to {most}, got {value!r}."
                )
        if self.head_type not in HEAD_TYPES:
            raise InvalidSettingError(
                f"head_type must be {' or '.join(map(repr, HEAD_TYPES))}, got {self.head_type!r}."
            )
        if (self.head_type == "exit") != (self.exit_layer is not None):
            raise InvalidSettingError("exit_layer goes with head_type='exit', and no other.")
        if self.head_type == "exit" and self.own_lm_head:
            raise InvalidSettingError("own_lm_head: a trained exit shares the model's LM head, or has an output_rank.")
        if self.own_lm_head and self.output_rank is not None:
            raise InvalidSettingError("output_rank: heads with own_lm_head=True share no output layer.")
        if self.head_type == "exit" and self.num_layers != 1:
            raise InvalidSettingError("num_layers: a trained exit is a single layer.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidSettingError(f"dtype of draft heads must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        for name in ("own_lm_head", "tied_heads"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSettingError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.tied_heads and self.head_type != "sequential":
            raise InvalidSettingError("tied_heads: only heads of head_type='sequential' can all be the same.")
        if self.tied_heads and self.own_lm_head:
            raise InvalidSettingError("own_lm_head: tied heads share their output layer too.")
        probe = self.base_probe
        if probe is not None and not (
            isinstance(probe, list) and all(isinstance(x, (int, float)) and abs(x) < 1e30 for x in probe)
        ):
            raise InvalidSettingError("base_probe of draft heads must be a list of finite numbers.")
        if self.provenance is not None and not isinstance(self.provenance, dict):
            raise InvalidSettingError("provenance of draft heads must be a dictionary.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
