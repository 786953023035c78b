"""What draft heads are taught, the base model's own distribution over the tokens ahead, and what they make of it.

Shapes: N positions, H heads, K labels kept of every distribution, V_d tokens that can be drafted.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# accuracy is counted for these many guesses
TOP_K = (1, 10)


def distillation_loss(
    logits: torch.Tensor, label_outputs: torch.Tensor, label_probabilities: torch.Tensor
) -> torch.Tensor:
    """Cross entropy `[N]` of a head against the K likeliest tokens of the base model at the position it predicts.

    Args:
        logits: `[N, V_d]`, of a head.
        label_outputs: `[N, K]`: which outputs of the head the labels are, -1 where the head cannot draft the token.
        label_probabilities: `[N, K]`: the base model's probabilities of them.

    Tokens that cannot be drafted are left out; what remains counts in full, so that a head is calibrated over what
    it can draft.
    """
    can = label_outputs >= 0
    weight = label_probabilities.float() * can
    log_q = functional.log_softmax(logits.float(), dim=-1).gather(-1, label_outputs.clamp(min=0))
    return -(weight * log_q).sum(-1) / weight.sum(-1).clamp(min=1e-6) * can.any(-1)


def feature_loss(state: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Smooth L1 distance `[N]` between a head's state and the hidden state `[N, d]` that it stands for (EAGLE)."""
    return functional.smooth_l1_loss(state.float(), hidden.float(), reduction="none").mean(-1)


def head_weights(num_heads: int, decay: float) -> torch.Tensor:
    """`[H]`: weight `decay**(k - 1)` of head k, counted from 1, summing to one.

    Medusa-1 (arXiv:2401.10774) takes 0.8.
    """
    weights = decay ** torch.arange(num_heads, dtype=torch.float32)
    return weights / weights.sum()


def rank_of(logits: torch.Tensor, target: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """`[n]`: how many outputs a head scores above the token that came; all of them where it cannot draft it.

    Args:
        logits: `[n, V_d]`, of a head.
        target: `[n]`: the output that stands for the token that came, -1 where the head cannot draft it.
        seen: `[n]`: whether there is a token at all; the rank is -1 where there is none.
    """
    score = logits.gather(1, target.clamp(min=0)[:, None])
    rank = (logits > score).sum(1)
    rank = torch.where(target >= 0, rank, logits.shape[1])
    return torch.where(seen, rank, -1)


def accuracy(ranks: torch.Tensor, losses: torch.Tensor) -> list[dict[str, float]]:
    """Per head: loss and top-k accuracy over the positions where there is a token to predict. `[n, H]` each."""
    found = []
    for head in range(ranks.shape[1]):
        rank = ranks[:, head]
        seen = rank >= 0
        one = {"loss": float(losses[seen, head].mean())}
        one.update({f"top{k}": float((rank[seen] < k).float().mean()) for k in TOP_K})
        found.append(one)
    return found
