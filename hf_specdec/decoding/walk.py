"""The walk: from the root of each row's tree down, one committed token at a time, as plain decoding takes its steps.

At every committed token, in order, it calls the logits processors, the acceptance rule and then the stopping criteria
with the `input_ids` plain `generate` would pass: once per token, never on a rejected draft. It owns the transcript.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..acceptance import Choose, Offer, check_choices
from ..draft import Draft, Scores, Verdict
from ..sampling import Selection
from .pace import Pace
from .transcript import Outputs, Transcript
from .verify import node_outputs


@dataclass
class _Walking:
    """One walk."""

    draft: Draft
    scores: Scores
    # row of the batch -> its row in the scores
    place: dict[int, int]
    # per row: nodes reached, tokens committed, how many of them were drafted
    paths: list[list[int]]
    committed: list[list[int]]
    accepted: list[int]
    # row -> the node that carries the token committed last, None where none does
    reached: dict[int, int | None] = field(default_factory=dict)

    @classmethod
    def over(cls, draft: Draft, scores: Scores) -> _Walking:
        place = {row: index for index, row in enumerate(scores.rows)}
        batch = range(draft.batch_size)
        return cls(
            draft, scores, place, [[0] if row in place else [] for row in batch], [[] for _ in batch], [0] * len(batch)
        )

    def offer(self, row: int) -> Offer:
        """The children below the node that a row has reached."""
        draft, node = self.draft, self.paths[row][-1]
        nodes = draft.children[row][node]
        if not nodes:
            return Offer()
        q = None if draft.q is None else [draft.q[row, child] for child in nodes]
        return Offer(nodes, [draft.tokens[row][child] for child in nodes], q)


@dataclass
class Walk:
    """Walks the trees of a call, round by round."""

    transcript: Transcript
    selection: Selection
    choose: Choose
    # `StoppingCriteriaList`, or what is called like one: (ids [k, T], scores) -> done [k]
    criteria: Callable[[torch.Tensor, Any], torch.Tensor]
    pace: Pace
    outputs: Outputs = field(default_factory=Outputs)
    streamer: Any | None = None
    # what finished rows go on with
    pad_token: int = 0

    def __call__(self, draft: Draft, scores: Scores) -> Verdict:
        """Commit what the target says along the drafts.

        Args:
            draft: for all rows of the batch.
            scores: of the rows that are carried.
        """
        transcript = self.transcript
        running = [not finished for finished in transcript.finished]
        walking = _Walking.over(draft, scores)
        rows = [row for row in scores.rows if self.pace.lockstep or not transcript.finished[row]]
        while rows:
            walking.reached = {}
            for length, group in self._groups(rows):
                self._step(walking, group, length)
            if all(transcript.finished):
                break
            rows = self._going_on(walking, rows)
        self._release_noise()
        return Verdict(
            kept=[path[: len(tokens)] for path, tokens in zip(walking.paths, walking.committed, strict=True)],
            committed=[tokens if runs else [] for tokens, runs in zip(walking.committed, running, strict=True)],
            accepted=walking.accepted,
        )

    def _groups(self, rows: list[int]) -> list[tuple[int, list[int]]]:
        """Rows of equal length, which processors and criteria can take in one call."""
        by_length: dict[int, list[int]] = {}
        for row in rows:
            by_length.setdefault(self.transcript.lengths[row], []).append(row)
        return sorted(by_length.items())

    def _step(self, walking: _Walking, group: list[int], length: int) -> None:
        """One token for each row of a group."""
        transcript, selection, scores = self.transcript, self.selection, walking.scores
        rows = None if len(group) == transcript.batch_size else group
        index = [walking.place[row] for row in group]
        at = [walking.paths[row][-1] for row in group]
        logits = scores.logits[index, at].to(copy=True, dtype=torch.float32, device=transcript.ids.device)
        processed = selection.process(transcript.view(rows, length), logits, rows)
        if length == transcript.prompt_length and selection.tape is not None:
            selection.tape.shape_from(processed)
        if self.outputs.any:
            self.outputs.record(processed, logits, node_outputs(scores, walking.paths))
        offers = [walking.offer(row) for row in group]
        choices = self.choose(processed, offers, length - transcript.prompt_length, rows)
        check_choices(choices, offers, processed.shape[-1])
        for row, choice in zip(group, choices, strict=True):
            token, node = choice.token, choice.node
            if transcript.finished[row] and self.pace.pads_finished:
                token = self.pad_token
                node = walking.offer(row).child(token)
            transcript.append(row, token)
            walking.committed[row].append(token)
            walking.accepted[row] += node is not None
            walking.reached[row] = node
        if self.streamer is not None:
            self.streamer.put(torch.tensor([walking.committed[row][-1] for row in group], device="cpu"))
        self._judge(rows, group, length + 1)

    def _judge(self, rows: list[int] | None, group: list[int], length: int) -> None:
        """Ask the stopping criteria about the tokens just committed."""
        scores = None if self.outputs.scores is None else tuple(self.outputs.scores)
        done = self.criteria(self.transcript.view(rows, length), scores).tolist()
        for row, finished in zip(group, done, strict=True):
            if finished:
                self.transcript.finished[row] = True

    def _going_on(self, walking: _Walking, rows: list[int]) -> list[int]:
        """The rows whose drafts held the token committed last; they step to it."""
        if self.pace.lockstep:
            rows = rows if all(walking.reached[row] is not None for row in rows) else []
        else:
            rows = [row for row in rows if walking.reached[row] is not None and not self.transcript.finished[row]]
        for row in rows:
            node = walking.reached[row]
            assert node is not None
            walking.paths[row].append(node)
        return rows

    def _release_noise(self) -> None:
        """Forget the noise of steps that every row has passed."""
        transcript = self.transcript
        if self.selection.tape is not None:
            lengths = [length for length, done in zip(transcript.lengths, transcript.finished, strict=True) if not done]
            self.selection.tape.release(min(lengths, default=0) - transcript.prompt_length)
