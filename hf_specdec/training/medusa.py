"""Training Medusa's heads: the positions they learn from, and their loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import Dataset

from ..heads.module import BoundHeads
from .data import Answers
from .losses import distillation_loss, feature_loss, head_weights, rank_of
from .settings import TrainingSettings

# ---------------------------------------------------------------- positions


class Positions(Dataset):
    """Every position of the answers that has at least one token to predict.

    Position t of an answer has the hidden state that gave token t; head k predicts token t + 1 + k from it.

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
            # [n, H]: the token that each head's predecessor stands on (head 0: the last committed one)
            "before": tokens[ahead - exists.long()],
            "target": self.output_of[tokens[ahead]],
            "label_outputs": self.output_of[answers.label_tokens[ahead].long()],
            "label_probabilities": answers.label_probabilities[ahead].float(),
            "features": answers.hidden[ahead].float(),
            "exists": exists,
        }


# ---------------------------------------------------------------- the model that is trained


class HeadsInTraining(nn.Module):
    """What `Trainer` sees: the heads, and a loss. The base model is no part of it."""

    def __init__(self, heads: BoundHeads, settings: TrainingSettings) -> None:
        super().__init__()
        self.heads = heads.heads
        self._bound, self._settings = heads, settings
        self._weights: torch.Tensor
        self.register_buffer("_weights", head_weights(heads.num_heads, settings.head_decay), persistent=False)

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
            mixed = loss + self._settings.feature_weight * shape
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
