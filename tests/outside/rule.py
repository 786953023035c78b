"""An acceptance rule as somebody outside the package writes it: one file, and one line that registers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec import AcceptanceRule, Choice, Offer
from hf_specdec.sampling import Selection


class Even:
    """The target's own token, as `coupled`, but only drafted tokens of even numbers are accepted. Lossless."""

    def __init__(self, selection: Selection) -> None:
        self.tape = selection.tape

    def __call__(
        self, scores: torch.Tensor, offers: Sequence[Offer], step: int, rows: list[int] | None
    ) -> list[Choice]:
        if self.tape is not None:
            scores = self.tape.perturb(scores, step, rows)
        return [
            Choice(token, offer.child(token) if token % 2 == 0 else None)
            for token, offer in zip(scores.argmax(-1).tolist(), offers, strict=True)
        ]


def build(selection: Selection, config: Any) -> Even:
    return Even(selection)


RULE = AcceptanceRule("even", build, lossless=True, reads_tape=True)
# the same, said to be lossy
LOSSY = AcceptanceRule("even_lossy", build, lossless=False, reads_tape=False)
