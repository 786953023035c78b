"""`typical`: accept what is probable enough (arXiv:2401.10774). LOSSY: the output distribution changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..acceptance import AcceptanceRule, Choice, Offer
from ..sampling import Selection
from . import draws


class Typical:
    """LOSSY. Accept a child where p(x) > min(epsilon, delta * exp(-entropy(p))) (arXiv:2401.10774, section 3.3)."""

    def __init__(self, selection: Selection, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.do_sample = selection.do_sample
        self.epsilon, self.delta = epsilon, delta

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        choices = []
        for p, offer in zip(scores.softmax(dim=-1), offers, strict=True):
            entropy = -(p * p.clamp(min=1e-20).log()).sum()
            threshold = min(self.epsilon, self.delta * float(torch.exp(-entropy)))
            likely = [
                (float(p[token]), -node, token)
                for node, token in zip(offer.nodes, offer.tokens, strict=True)
                if float(p[token]) > threshold
            ]
            if likely:
                _, node, token = max(likely)
                choices.append(Choice(token, -node))
            else:
                token = draws.token(p) if self.do_sample else int(p.argmax())
                choices.append(Choice(token, None))
        return choices


def build(selection: Selection, config: Any) -> Typical:
    """The rule for one call."""
    return Typical(selection, config.typical_epsilon, config.typical_delta)


RULE = AcceptanceRule("typical", build, lossless=False, reads_tape=False)
