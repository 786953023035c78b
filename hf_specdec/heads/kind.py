"""`HeadKind`: all that is said of a kind of draft heads, and the kinds by name. A new kind is one file and one line.

Nothing else in the package names a kind: loading, training, evaluation, the model card and the command line ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset

from ..errors import AdapterError, ConfigurationError
from .answers import Answers
from .config import HeadConfig
from .output import HeadNetwork, SharedOutput


class LearningSettings(Protocol):
    """The training settings that a kind may heed (`training.TrainingSettings`)."""

    @property
    def batch_size(self) -> int:
        """Positions per step."""
        ...

    @property
    def head_decay(self) -> float:
        """The loss of head k, counted from 1, counts `head_decay**(k - 1)`."""
        ...

    @property
    def feature_weight(self) -> float:
        """Weight of the distance between a head's state and the hidden state it stands for."""
        ...


@dataclass(frozen=True)
class Task:
    """What is trained, and on what. H heads, n items of a batch."""

    # its forward takes a batch as keywords and returns "loss", and "losses" and "ranks" `[n, H]` (`losses.rank_of`)
    learner: nn.Module
    # items are dictionaries of tensors; `__getitems__` makes a whole batch
    training: Dataset
    held_out: Dataset
    # items per step
    batch_size: int


@dataclass(frozen=True)
class Accuracy:
    """How well heads predict recorded answers."""

    # of every head: {"loss": ..., "top1": ..., "top10": ...}
    heads: list[dict[str, float]]
    # name of a `Table` -> per column, per answer: (count, out of so many)
    counts: Mapping[str, Sequence[Sequence[tuple[int, int]]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """What an evaluation counts per task, and how the model card shows it."""

    # in the evaluation that is saved
    name: str
    title: str
    # names of its columns, counted by `HeadKind.accuracy`; None has one for each size of tree, and counts mean
    # acceptance lengths of the kind's mode along the answers. The mode must read nothing but the last hidden state
    columns: tuple[str, ...] | None = None
    # settings of the mode for that
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CardText:
    """What the model card says of heads of some settings."""

    # "Sequential draft heads", above "for <model>"
    title: str
    # "4 heads of 2 residual blocks"
    shape: str
    # what they see and where that comes from, a sentence or two
    principle: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """How other projects' files of such heads are read."""

    # patterns of the files that are fetched from the Hub
    files: tuple[str, ...]
    # settings, and tensors under our names, of the heads in a folder; raises `AdapterError`
    read: Callable[[Path], tuple[HeadConfig, dict[str, torch.Tensor]]]


# writes heads for another project; returns what to do with them
Writer = Callable[[Any, Path, str], str]


def _fits(config: Any, model: Any) -> None:
    """Nothing more is asked of the base model."""


def _sound(tensors: dict[str, torch.Tensor], config: Any, adapter_name: str) -> None:
    """Nothing more is asked of the tensors."""


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of draft heads: what they are, how they learn, and how they are spoken of."""

    # ------------------------------------------------------------------ what they are

    # as on the command line: `--kind name`
    name: str
    # their settings; the class names the PEFT type. Kinds may share a class and differ in `preset`
    config: type[HeadConfig]
    # settings that make heads of this class ones of this kind
    preset: Mapping[str, Any] = field(default_factory=dict)
    # new weights of these settings for a model
    network: Callable[[Any, Any], HeadNetwork]
    # (weights, settings, model) -> the heads with the model they draft for
    bind: Callable[[Any, Any, Any], SharedOutput]
    # the mode that drafts with them; its setting `adapter` names an adapter
    mode: str
    # raises `AdapterError` unless heads of these settings fit a model, beyond what is asked of all heads
    check_base: Callable[[Any, Any], None] = _fits
    # (tensors by name, settings, name of the adapter): the same for tensors that are loaded
    check_tensors: Callable[[dict[str, torch.Tensor], Any, str], None] = _sound

    # ------------------------------------------------------------------ how they learn

    # (heads, (training, held-out) answers, settings, folder for what is kept, whether to show progress)
    task: Callable[[Any, Sequence[Answers], LearningSettings, Path, bool], Task]
    # (heads, answers, whether to show progress)
    accuracy: Callable[[Any, Answers, bool], Accuracy]
    tables: tuple[Table, ...] = ()

    # ------------------------------------------------------------------ how they are spoken of

    # in messages: "<model> has no ..."
    called: str
    card: Callable[[Any], CardText]
    # the name of the network that is counted k-th, from 1
    head_name: str = "head {number}"
    # positions between the hidden state that the first head reads and the token that it predicts
    first_ahead: int = 2

    # ------------------------------------------------------------------ other projects' formats

    reader: Reader | None = None
    # name of a format (`convert --to`) -> how it is written
    writers: Mapping[str, Writer] = field(default_factory=dict)

    def makes(self, config: HeadConfig) -> bool:
        """Whether heads of these settings are of this kind."""
        return type(config) is self.config and all(getattr(config, key) == value for key, value in self.preset.items())

    def with_settings(self, **settings: Any) -> Any:
        """A config of this kind. Raises `InvalidSettingError`."""
        return self.config(**{**self.preset, **settings})


_kinds: dict[str, HeadKind] = {}


def add_kind(kind: HeadKind) -> None:
    """Make a kind known here; `register_head_kind` makes it known to PEFT too."""
    _kinds[kind.name] = kind


def head_kinds() -> list[HeadKind]:
    """The kinds that are registered, in the order in which they were."""
    return list(_kinds.values())


def get_head_kind(name: str) -> HeadKind:
    """The kind of this name. Raises `ConfigurationError`, which lists the known ones."""
    if name not in _kinds:
        raise ConfigurationError(f"Unknown kind of draft heads {name!r}. Known kinds: {', '.join(_kinds)}.")
    return _kinds[name]


def kind_of(config: Any) -> HeadKind:
    """The kind that heads of these settings are of. Raises `AdapterError` where there is none."""
    for kind in head_kinds():
        if kind.makes(config):
            return kind
    raise AdapterError(
        f"{type(config).__name__} describes no registered kind of draft heads. Import what registers it "
        "(hf_specdec.heads.register_head_kind)."
    )
