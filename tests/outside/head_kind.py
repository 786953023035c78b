"""A kind of draft heads and the mode that drafts with it, as somebody outside the package writes them: one file.

A small network on the last hidden state predicts one token, the one after the last committed token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from hf_specdec import (
    LAST_HIDDEN,
    Budget,
    Context,
    Draft,
    Drafter,
    HiddenRequest,
    Mode,
    Request,
    Scores,
    SpeculativeConfig,
    Verdict,
    register_mode,
)
from hf_specdec.heads import HeadConfig, HeadKind, HeadNetwork, SharedOutput, find_heads, register_head_kind
from hf_specdec.heads.answers import Answers
from hf_specdec.heads.kind import Accuracy, CardText, LearningSettings, Table, Task
from hf_specdec.heads.losses import accuracy, rank_of
from hf_specdec.heads.output import lm_head_shape
from hf_specdec.target.cached_model import CachedModel

NAME = "next_token"


@dataclass
class NextTokenConfig(HeadConfig):
    """Settings of the network.

    Args:
        width: of its inner layer.
    """

    type_name: ClassVar[str] = "NEXT_TOKEN"

    width: int = field(default=16, metadata={"help": "width of the inner layer", "option": "N"})


class Network(HeadNetwork):
    """`x + W2 SiLU(W1 x)`, and the shared output layer. Starts as the identity."""

    def __init__(self, config: NextTokenConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, config.width)
        self.outer = nn.Linear(config.width, hidden_size, bias=False)
        nn.init.zeros_(self.outer.weight)
        self.add_outputs(config, hidden_size, vocab_size)


class BoundNetwork(SharedOutput):
    """The network with the model it drafts for."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores `[k, V_d]` of what follows, from last hidden states `[k, d]`."""
        hidden = hidden.to(self.weights.dtype)
        return self.shared_logits(hidden + self.weights.outer(functional.silu(self.weights.inner(hidden))))


class Pairs(Dataset):
    """Hidden states of answers, and the token after the one that each gave."""

    def __init__(self, answers: Answers, output_of: torch.Tensor) -> None:
        lengths = answers.lengths.long()
        last = torch.zeros(len(answers.tokens), dtype=torch.bool)
        last[lengths.cumsum(0)[lengths > 0] - 1] = True
        self.at = (~last).nonzero().squeeze(1)
        self.hidden, self.target = answers.hidden, output_of[answers.tokens.long()]

    def __len__(self) -> int:
        return len(self.at)

    def __getitems__(self, items: Sequence[int]) -> dict[str, torch.Tensor]:
        at = self.at[torch.as_tensor(items)]
        return {"hidden": self.hidden[at].float(), "target": self.target[at + 1]}


class Learner(nn.Module):
    """Cross entropy with the token that came, where it can be drafted."""

    def __init__(self, heads: BoundNetwork) -> None:
        super().__init__()
        self.weights, self._heads = heads.weights, heads

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self._heads.logits(hidden)
        losses = functional.cross_entropy(logits, target, ignore_index=-1, reduction="none")
        ranks = rank_of(logits.detach(), target, torch.ones_like(target, dtype=torch.bool))
        return {"loss": losses.mean(), "losses": losses.detach()[:, None], "ranks": ranks[:, None]}


def task_of(
    heads: BoundNetwork, parts: Sequence[Answers], settings: LearningSettings, folder: Path, progress: bool
) -> Task:
    training, held_out = (Pairs(part, heads.outputs()) for part in parts)
    return Task(Learner(heads), training, held_out, settings.batch_size)


@torch.no_grad()
def accuracy_along(heads: BoundNetwork, answers: Answers, progress: bool) -> Accuracy:
    pairs = Pairs(answers, heads.outputs())
    found = Learner(heads)(**pairs.__getitems__(range(len(pairs))))
    return Accuracy(accuracy(found["ranks"], found["losses"]))


def new_network(config: NextTokenConfig, model: Any) -> Network:
    vocab_size, hidden_size = lm_head_shape(model)
    return Network(config, hidden_size, vocab_size)


KIND = HeadKind(
    name=NAME,
    config=NextTokenConfig,
    network=new_network,
    bind=BoundNetwork,
    mode=NAME,
    task=task_of,
    accuracy=accuracy_along,
    tables=(Table("acceptance", "Mean acceptance length"),),
    called="next-token network",
    card=lambda config: CardText(
        title="A next-token network",
        shape=f"A network of width {config.width}",
        principle="It sees the last hidden state.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class NextTokenModeConfig(SpeculativeConfig):
    """Settings of the mode.

    Args:
        adapter: name of the adapter that drafts; None takes the active one.
    """

    adapter: str | None = None


class NextTokenDrafter(Drafter):
    """Drafts one token per row."""

    hidden = HiddenRequest(layers=(LAST_HIDDEN,))

    def __init__(self, heads: BoundNetwork) -> None:
        self.heads = heads
        # per row [d]: what gave the last committed token
        self._states: dict[int, torch.Tensor] = {}

    def attach(self, target: CachedModel, prompt: Scores) -> None:
        self._states = dict(enumerate(prompt.hidden[LAST_HIDDEN][:, -1]))

    @torch.no_grad()
    def propose(self, context: Context, budget: Budget) -> Draft:
        chains: list[list[int]] = [[] for _ in context.roots]
        rows = [row for row, depth in enumerate(budget.depth) if depth > 0]
        if rows:
            logits = self.heads.logits(torch.stack([self._states[row] for row in rows]))
            for row, token in zip(rows, self.heads.tokens(logits.argmax(-1)).tolist(), strict=True):
                chains[row] = [token]
        return Draft.chains(context.roots, chains)

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for place, row in enumerate(scores.rows):
            if verdict.committed[row]:
                self._states[row] = scores.hidden[LAST_HIDDEN][place, verdict.kept[row][-1]]


def build(request: Request, config: Any) -> NextTokenDrafter:
    return NextTokenDrafter(find_heads(request.model, config.adapter, mode=NAME))


def register() -> None:
    """What a user's module does when it is imported."""
    register_head_kind(KIND)
    register_mode(Mode(NAME, NextTokenModeConfig, build))
