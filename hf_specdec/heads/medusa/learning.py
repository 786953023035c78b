"""What Medusa heads learn from: positions of answers, and a loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from ...errors import TrainingDataError
from ..answers import Answers
from ..kind import LearningSettings, Task
from ..losses import accuracy, distillation_loss, feature_loss, head_weights, rank_of
from .network import BoundHeads

# positions that are looked at together
_POSITIONS = 1024

# ---------------------------------------------------------------- positions


class Positions(Dataset):
    """Every position of the answers that has at least one token to predict.

    Position t of an answer has the hidden state that gave token t; from it head k, counted from 1, predicts token
    t + k.

    Args:
        answers: what the base model said.
        num_heads: H.
        output_of: `[V]`: the heads' output for each token, -1 where they cannot draft it.
    """

    def __init__(self, answers: Answers, num_heads: int, output_of: torch.Tensor) -> None:
        self.answers, self.num_heads, self.output_of = answers, num_heads, output_of
        lengths = answers.lengths.long()
        ends = lengths.cumsum(0).repeat_interleave(lengths)
        # [N]: tokens of the same answer after each position
        self.ahead = ends - torch.arange(len(ends)) - 1
        self.index = self.ahead.nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([item]).items()}

    def __getitems__(self, items: Sequence[int]) -> dict[str, torch.Tensor]:
        """A whole batch at once: the loader's collator has nothing left to do."""
        at = self.index[torch.as_tensor(items)]
        steps = torch.arange(self.num_heads)
        ahead = at[:, None] + 1 + steps  # [n, H]
        exists = steps < self.ahead[at][:, None]
        ahead = torch.where(exists, ahead, at[:, None])
        answers, tokens = self.answers, self.answers.tokens.long()
        return {
            "hidden": answers.hidden[at].float(),
            # [n, H]: the token that each head's predecessor stands on (for the first: the last committed one)
            "before": tokens[ahead - exists.long()],
            "target": self.output_of[tokens[ahead]],
            "label_outputs": self.output_of[answers.label_tokens[ahead].long()],
            "label_probabilities": answers.label_probabilities[ahead].float(),
            "features": answers.hidden[ahead].float(),
            "exists": exists,
        }


# ---------------------------------------------------------------- the model that is trained


class HeadsInTraining(nn.Module):
    """What `Trainer` sees: the heads, and a loss. The base model is no part of it.

    Args:
        heads: the heads.
        head_decay: the loss of head k, counted from 1, counts `head_decay**(k - 1)`.
        feature_weight: weight of the distance between a head's state and the hidden state it stands for.
    """

    def __init__(self, heads: BoundHeads, head_decay: float = 0.8, feature_weight: float = 1.0) -> None:
        super().__init__()
        self.heads = heads.weights
        self._bound, self._feature_weight = heads, feature_weight
        self._weights: torch.Tensor
        self.register_buffer("_weights", head_weights(heads.num_heads, head_decay), persistent=False)

    def forward(
        self,
        hidden: torch.Tensor,
        before: torch.Tensor,
        target: torch.Tensor,
        label_outputs: torch.Tensor,
        label_probabilities: torch.Tensor,
        features: torch.Tensor,
        exists: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Loss, and for every head `[n, H]`: its own loss and the rank of the token that came (-1: there is none)."""
        bound, count = self._bound, self._bound.num_heads
        states = states_along(bound, hidden, before)
        losses, ranks, total = [], [], hidden.new_zeros(())
        for head in range(count):
            logits = bound.logits(head, states[head])
            loss = distillation_loss(logits, label_outputs[:, head], label_probabilities[:, head])
            shape = feature_loss(states[head], features[:, head])
            seen = exists[:, head]
            mixed = loss + self._feature_weight * shape
            total = total + self._weights[head] * (mixed * seen).sum() / seen.sum().clamp(min=1)
            losses.append(loss.detach())
            ranks.append(rank_of(logits.detach(), target[:, head], seen))
        return {"loss": total, "losses": torch.stack(losses, 1), "ranks": torch.stack(ranks, 1)}


def states_along(heads: BoundHeads, hidden: torch.Tensor, before: torch.Tensor) -> list[torch.Tensor]:
    """The state `[n, d]` of every head, along the tokens `before [n, H]` that the text goes on with."""
    if not heads.is_sequential:
        return list(heads.all_states(hidden))
    states, state = [], heads.start(hidden)
    for head in range(heads.num_heads):
        state = heads.step(head, state, before[:, head])
        states.append(state)
    return states


# ---------------------------------------------------------------- what a kind of heads says


def task_of(
    heads: BoundHeads, parts: Sequence[Answers], settings: LearningSettings, folder: Path, progress: bool
) -> Task:
    """What heads learn from these answers (training, held out). See `HeadKind.task`."""
    _check_length(heads, min(int(part.lengths.max()) for part in parts), "learn from")
    training, held_out = (Positions(part, heads.num_heads, heads.outputs()) for part in parts)
    learner = HeadsInTraining(heads, settings.head_decay, settings.feature_weight)
    return Task(learner, training, held_out, settings.batch_size)


@torch.no_grad()
def accuracy_along(heads: BoundHeads, answers: Answers) -> list[dict[str, float]]:
    """Per head: loss and top-k accuracy at every position of the answers."""
    _check_length(heads, int(answers.lengths.max()), "be measured on")
    positions = Positions(answers, heads.num_heads, heads.outputs())
    learner, found = HeadsInTraining(heads).to(heads.model.device), []
    for start in range(0, len(positions), _POSITIONS):
        batch = positions.__getitems__(range(start, min(start + _POSITIONS, len(positions))))
        found.append(learner(**{name: tensor.to(heads.model.device) for name, tensor in batch.items()}))
    ranks, losses = (torch.cat([part[name] for part in found]) for name in ("ranks", "losses"))
    return accuracy(ranks, losses)


def _check_length(heads: BoundHeads, longest: int, what: str) -> None:
    if longest <= heads.num_heads:
        raise TrainingDataError(
            f"The longest answer has {longest} tokens, too few for {heads.num_heads} heads to {what}. Make longer "
            "answers, or fewer heads, or ask other prompts."
        )
