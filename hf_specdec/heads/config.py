"""`HeadConfig`: what adapters of draft heads of every kind note in `adapter_config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft import PeftConfig

from ..errors import InvalidSettingError
from ..host.peft import peft_type

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class HeadConfig(PeftConfig):
    """Settings that draft heads of every kind share.

    A subclass names its PEFT type and adds settings of its own. A field whose metadata says `"option"` (what stands for
    its value in a help text) is an option of `hf-specdec train-heads`; the metadata's `"help"` explains it.

    Main arguments:
        draft_vocab_size: V_d, tokens that the heads can draft (FR-Spec, arXiv:2502.14856); None takes all. Which ones
            is the `token_map` among the weights: the first so many until training or conversion chooses better.
        output_rank: r, of an output layer of the adapter's own that all its heads share, two factors of width r: far
            cheaper to read than the model's LM head, which None shares.

    Other arguments:
        dtype: of the heads' weights; None takes the model's, but float32 for half precision on a CPU.

    Filled in when the heads are made:
        hidden_size, vocab_size: d and V, of the base model.
        base_probe: a few weights of the base model's embedding, by which it is known again.
        provenance: how they were trained and what was measured, for the model card.

    Raises:
        InvalidSettingError: a setting is of the wrong type or out of range.
    """

    # the adapter type's name, as in `adapter_config.json`; capital letters and underscores
    type_name: ClassVar[str]

    draft_vocab_size: int | None = field(default=None, metadata={"help": "Tokens that the heads can draft."})
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
        self.peft_type = peft_type(self.type_name)
        if self.task_type is None:
            self.task_type = "CAUSAL_LM"
        for name in ("draft_vocab_size", "output_rank", "hidden_size", "vocab_size"):
            if getattr(self, name) is not None:
                check_whole(self, name)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidSettingError(f"dtype of draft heads must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        probe = self.base_probe
        if probe is not None and not (
            isinstance(probe, list) and all(isinstance(x, (int, float)) and abs(x) < 1e30 for x in probe)
        ):
            raise InvalidSettingError("base_probe of draft heads must be a list of finite numbers.")
        if self.provenance is not None and not isinstance(self.provenance, dict):
            raise InvalidSettingError("provenance of draft heads must be a dictionary.")

    @property
    def has_own_outputs(self) -> bool:
        """Whether the heads score tokens by output layers of their own, not by the base model's LM head."""
        return self.output_rank is not None


def check_whole(config: HeadConfig, name: str, most: int = 2**31) -> None:
    """Raise `InvalidSettingError` unless a setting is a whole number from 1 to `most`."""
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidSettingError(f"{name} of draft heads must be a whole number from 1 to {most}, got {value!r}.")


def check_flag(config: HeadConfig, name: str) -> None:
    """Raise `InvalidSettingError` unless a setting is True or False."""
    value = getattr(config, name)
    if not isinstance(value, bool):
        raise InvalidSettingError(f"{name} must be True or False, got {value!r}.")
