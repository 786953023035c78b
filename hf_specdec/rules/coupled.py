"""`coupled`: the target's own token. Lossless by construction, and the text of plain decoding with the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..acceptance import AcceptanceRule, Choice, Offer
from ..sampling import Selection


class Coupled:
    """The target's own token: what plain decoding picks here, by argmax or from the noise tape."""

    def __init__(self, selection: Selection) -> None:
        self.tape = selection.tape

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        if self.tape is not None:
            scores = self.tape.perturb(scores, step, rows)
        tokens = scores.argmax(dim=-1).tolist()
        return [Choice(token, offer.child(token)) for token, offer in zip(tokens, offers, strict=True)]


def build(selection: Selection, config: Any) -> Coupled:
    """The rule for one call."""
    return Coupled(selection)


RULE = AcceptanceRule("coupled", build, lossless=True, reads_tape=True)
