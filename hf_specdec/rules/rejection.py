"""`rejection`: speculative sampling. The distribution of plain sampling, with other draws.

Accept a child with probability min(1, p/q), else go on with norm(max(p - q, 0)) (arXiv:2211.17192, Alg. 1; siblings in
turn, arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..acceptance import AcceptanceRule, Choice, Offer
from ..sampling import Selection
from . import draws


class Rejection:
    """Speculative sampling: accept with min(1, p/q), else recover from the residual norm(max(p - q, 0)).

    Siblings are tried in turn, each against the residual that the ones before it left (arXiv:2305.09781). A child
    without q is a point mass: accepted with probability p(x), and its token leaves the residual. When greedy, p is a
    point mass itself and the rule is the comparison of argmaxes.
    """

    def __init__(self, selection: Selection) -> None:
        self.do_sample = selection.do_sample

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        if not self.do_sample:
            tokens = scores.argmax(dim=-1).tolist()
            return [Choice(token, offer.child(token)) for token, offer in zip(tokens, offers, strict=True)]
        return [self.sample(p, offer) for p, offer in zip(scores.softmax(dim=-1), offers, strict=True)]

    @staticmethod
    def sample(p: torch.Tensor, offer: Offer) -> Choice:
        """Choose for one row, `p [V]`."""
        for index, (node, token) in enumerate(zip(offer.nodes, offer.tokens, strict=True)):
            q = None if offer.q is None else offer.q[index]
            drafted = 1.0 if q is None else float(q[token])
            if draws.coin(min(1.0, float(p[token]) / drafted) if drafted > 0.0 else 0.0, p.device):
                return Choice(token, node)
            residual = p.clone()
            if q is None:
                residual[token] = 0.0
            else:
                shared = min(len(q), len(p))  # vocabularies padded differently share their first entries
                residual[:shared] -= q[:shared].to(p)
                residual.clamp_(min=0.0)
            total = residual.sum()
            if float(total) <= 0.0:
                break  # p and q agree up to rounding: nothing is left to recover from, so p itself is right
            p = residual / total
        return Choice(draws.token(p), None)


def build(selection: Selection, config: Any) -> Rejection:
    """The rule for one call."""
    return Rejection(selection)


RULE = AcceptanceRule("rejection", build, lossless=True, reads_tape=False)
