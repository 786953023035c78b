"""What has been committed so far, as drafters see it, and how a drafter chooses tokens as the target would.

Shapes: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .sampling import NoiseTape, Selection

# how a model that drafts picks tokens when the target samples
DraftSampling = Literal["tape", "greedy"]


@dataclass(frozen=True)
class Picks:
    """Tokens picked for k places, the best first."""

    # [k, count]
    tokens: torch.Tensor
    # [k, count]: the drafter's probabilities of them
    confidence: torch.Tensor
    # [k, V]: what they were drawn from, None where they were not
    q: torch.Tensor | None = None


@dataclass(frozen=True)
class Source:
    """What the encoder of an encoder-decoder model was given, and what it made of it."""

    # arguments of the encoder's forward, `[B, ...]`; empty where only its output was given
    inputs: Mapping[str, torch.Tensor]
    # [B, S, d]
    states: torch.Tensor


@dataclass
class Context:
    """What has been committed so far, as the drafters may see it. Only the loop writes it."""

    # per row: the prompt without its padding, then every committed token
    tokens: list[list[int]]
    # per row: how many of `tokens` are prompt
    prompt_lengths: list[int]
    # per row: nothing more will be committed
    finished: list[bool]
    # where drafts on the accelerator should live
    device: torch.device
    # how the target turns logits into tokens; pure parts may be replayed on drafts
    selection: Selection
    # [B, P]: the prompts as the processors see them, with their padding
    padded_prompts: torch.Tensor
    # V, of the target's logits; None until they are known
    vocab_size: int | None = None
    # None where the target has no encoder
    source: Source | None = None

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def roots(self) -> list[int]:
        """Last committed token of every row, whose keys are not cached yet."""
        return [row[-1] for row in self.tokens]

    def step(self, row: int) -> int:
        """Number of tokens generated so far in `row`."""
        return len(self.tokens[row]) - self.prompt_lengths[row]

    def input_ids(self, row: int, drafted: Sequence[int] = ()) -> torch.Tensor:
        """`[1, T]`: what the processors would see in `row` after these drafted tokens."""
        prompt = self.padded_prompts[row : row + 1]
        generated = [*self.tokens[row][self.prompt_lengths[row] :], *drafted]
        return torch.cat([prompt, prompt.new_tensor([generated])], dim=1) if generated else prompt

    def probabilities(
        self, logits: torch.Tensor, rows: Sequence[int], drafted: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """What the target would sample from, were these its logits: after its processors, where they may be replayed.

        Args:
            logits: `[k, V]`, of a drafter or of the target.
            rows: which row of the batch each belongs to.
            drafted: what was drafted in that row before it.

        Returns:
            probabilities `[k, V]`.
        """
        selection, logits = self.selection, logits.to(self.device, torch.float32)
        if not selection.processors or not selection.is_row_wise:
            return logits.softmax(-1)
        # processors are made for the target's vocabulary, of which a drafter may know only the beginning
        known = logits.shape[-1]
        if self.vocab_size is not None and known < self.vocab_size:
            logits = torch.nn.functional.pad(logits, (0, self.vocab_size - known), value=-torch.inf)
        if selection.is_context_free:
            return selection.process(self.padded_prompts, logits, None).softmax(-1)[:, :known]
        scores = [
            selection.process(self.input_ids(row, path), logits[i : i + 1], [row])
            for i, (row, path) in enumerate(zip(rows, drafted, strict=True))
        ]
        return torch.cat(scores).softmax(-1)[:, :known]

    def pick(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        drafted: Sequence[Sequence[int]],
        *,
        count: int = 1,
        sampling: DraftSampling = "tape",
        draws: bool = False,
        steps: Sequence[int] | None = None,
    ) -> Picks:
        """The tokens that the target would most probably choose, were these its logits.

        The one place where a drafter's way of choosing follows the target's: greedy targets and `"greedy"` take the
        most probable tokens; where the target samples from the noise tape, the draft ranks its probabilities over the
        same noise (arXiv:2408.07978); where the acceptance rule compares distributions, drafters that can pass q on
        draw from it.

        Args:
            logits: `[k, V]`; V may fall short of the target's vocabulary.
            rows: which row of the batch each belongs to.
            drafted: what was drafted in that row before it.
            count: tokens to pick, the best first; one is drawn where `draws` applies.
            sampling: `"tape"` or `"greedy"`, a mode's setting `draft_sampling`.
            draws: whether the drafter passes q on, so that under `rejection` tokens are drawn from it.
            steps: which generated token each is about, where `drafted` does not tell.
        """
        if steps is None:
            steps = [self.step(row) + len(path) for row, path in zip(rows, drafted, strict=True)]
        if draws and self.draws_own_noise and sampling == "tape":
            q = self.probabilities(logits, rows, drafted)
            tokens = torch.multinomial(q, 1)
            return Picks(tokens, q.gather(1, tokens), q)
        count = min(count, logits.shape[-1])
        if self.takes_logits_as_they_are(sampling):
            logits = logits.to(self.device, torch.float32)
            best = logits.topk(count)
            return Picks(best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).exp())
        probabilities = self.probabilities(logits, rows, drafted)
        ranked = self._over_noise(probabilities, rows, steps) if sampling == "tape" else probabilities
        tokens = ranked.topk(count).indices
        return Picks(tokens, probabilities.gather(1, tokens))

    def takes_logits_as_they_are(self, sampling: DraftSampling = "tape") -> bool:
        """Whether `pick` looks at nothing but the logits, so that those of a part of the vocabulary will do."""
        processes = bool(self.selection.processors) and self.selection.is_row_wise
        return not processes and (self.tape is None or sampling == "greedy")

    def _over_noise(self, probabilities: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
        """Probabilities `[k, V]` over the noise of the target's sampling, as they are where there is none to read."""
        tape = self.tape
        if tape is None:
            return probabilities
        noise = [
            tape.noise(step)[row, : probabilities.shape[1]]
            if step >= self.step(row) and not self.finished[row]
            else torch.ones_like(probabilities[0])
            for row, step in zip(rows, steps, strict=True)
        ]
        return probabilities / torch.stack(noise)

    @property
    def draws_own_noise(self) -> bool:
        """Whether the acceptance rule compares distributions, so that drafts must be drawn from q."""
        return self.selection.do_sample and self.selection.tape is None

    @property
    def tape(self) -> NoiseTape | None:
        """The noise that sampling will use, or None where reading it ahead is not allowed."""
        return self.selection.readable_tape
