"""Acceptance rules: what the target commits at one node of a draft. Pure: no model, no cache.

The walk asks a rule once per committed token. The rule sees the processed scores of the node that was reached and the
children drafted below it, and returns the token to commit and the child that carries it, if any. Where no child does,
that token ends the round.

- `coupled` (default): the target's own token, `argmax` of the scores, over the noise of the step when sampling.
  Lossless by construction, the same text as plain decoding with the same seed.
- `rejection`: accept a child with probability min(1, p/q), else go on with norm(max(p - q, 0)) (arXiv:2211.17192,
  Alg. 1; siblings in turn, arXiv:2305.09781). The same distribution as plain sampling, but other draws.
- `typical`: accept what is likely enough (arXiv:2401.10774). LOSSY: the output distribution changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..sampling import Selection


@dataclass(frozen=True)
class Offer:
    """The children drafted below a node."""

    # node numbers and tokens of the children, in order of preference
    nodes: Sequence[int] = ()
    tokens: Sequence[int] = ()
    # per child: the distribution it was drawn from, [V_q]; None for a deterministic draft
    q: Sequence[torch.Tensor] | None = None

    def child(self, token: int) -> int | None:
        """The child that carries `token`."""
        for node, offered in zip(self.nodes, self.tokens, strict=True):
            if offered == token:
                return node
        return None


@dataclass(frozen=True)
class Choice:
    """One committed token, and the drafted node that carried it (None: the round ends here)."""

    token: int
    node: int | None


class Rule(Protocol):
    """A rule of acceptance."""

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        """Choose for `scores [k, V]` of the given rows (None: all of the batch), all at generation step `step`."""
        ...


class Coupled:
    """The target's own token: what plain decoding picks here, by argmax or from the noise tape."""

    lossless = True

    def __init__(self, selection: Selection) -> None:
        self.tape = selection.tape

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        if self.tape is not None:
            scores = self.tape.perturb(scores, step, rows)
        tokens = scores.argmax(dim=-1).tolist()
        return [Choice(token, offer.child(token)) for token, offer in zip(tokens, offers, strict=True)]


class Rejection:
    """Speculative sampling: accept with min(1, p/q), else recover from the residual norm(max(p - q, 0)).

    Siblings are tried in turn, each against the residual that the ones before it left (arXiv:2305.09781). A child
    without q is a point mass: accepted with probability p(x), and its token leaves the residual. When greedy, p is a
    point mass itself and the rule is the comparison of argmaxes.
    """

    lossless = True

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
            if _coin(min(1.0, float(p[token]) / drafted) if drafted > 0.0 else 0.0, p.device):
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
        return Choice(_draw(p), None)


class Typical:
    """LOSSY. Accept a child where p(x) > min(epsilon, delta * exp(-entropy(p))) (arXiv:2401.10774, section 3.3)."""

    lossless = False

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
                token = _draw(p) if self.do_sample else int(p.argmax())
                choices.append(Choice(token, None))
        return choices


# the only two places where a rule is random


def _coin(probability: float, device: torch.device) -> bool:
    """True with this probability."""
    return float(torch.rand((), device=device)) < probability


def _draw(p: torch.Tensor) -> int:
    """A token from `p [V]`."""
    return int(torch.multinomial(p, 1))
