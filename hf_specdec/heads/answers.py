"""What heads are trained and evaluated on: a base model's answers to prompts.

Shapes: N tokens, d hidden size, K labels kept of every distribution, A answers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from ..errors import TrainingDataError

# what is kept of every token, as `Answers` calls it
PER_TOKEN = ("tokens", "hidden", "label_tokens", "label_probabilities")


@dataclass(frozen=True)
class Answers:
    """Many answers, one after the other: N tokens in A answers."""

    # [N], [N, d], [N, K], [N, K]: the tokens, the hidden state that gave each, the likeliest tokens where each was
    # chosen, and their probabilities
    tokens: torch.Tensor
    hidden: torch.Tensor
    label_tokens: torch.Tensor
    label_probabilities: torch.Tensor
    # [A]: tokens of every answer
    lengths: torch.Tensor
    # per answer, the token ids of its prompt
    prompts: list[list[int]]
    # what it took to make them
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.lengths) or len(self.tokens) != int(self.lengths.sum()):
            raise TrainingDataError(
                f"{len(self.tokens)} tokens, {len(self.lengths)} answers and {len(self.prompts)} prompts do not match."
            )

    def split(self, part: float) -> tuple[Answers, Answers]:
        """(training, held-out) answers; all answers to a prompt fall on the same side, in every run."""
        digests = [hashlib.sha256(json.dumps(prompt).encode()).digest()[:4] for prompt in self.prompts]
        held_out = torch.tensor([int.from_bytes(digest, "big") < part * 2**32 for digest in digests])
        return self._pick(~held_out), self._pick(held_out)

    def _pick(self, which: torch.Tensor) -> Answers:
        positions = which.repeat_interleave(self.lengths.long())
        return Answers(
            **{name: getattr(self, name)[positions] for name in PER_TOKEN},
            lengths=self.lengths[which],
            prompts=[prompt for prompt, picked in zip(self.prompts, which.tolist(), strict=True) if picked],
        )
