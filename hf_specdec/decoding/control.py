"""How large a draft pays here: what forwards cost, how often drafts hold, and the ratio rule that weighs the two.

A round over n nodes commits E(n) tokens in T(n) seconds. The size that maximises E / T is taken; zero is a size
(Sequoia, arXiv:2402.12374, section 3.3). T is measured in the run itself: it is a staircase that differs between
machines, batches and dtypes. E follows from the drafters' confidences, corrected by what became of earlier ones.
Outputs never depend on any of this.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from .. import tree
from ..draft import Budget, Draft, Verdict

# Cost of a forward over n tokens relative to one token, until it has been measured (tokens of all rows)
_PRIOR_COST = {
    "cpu": [(1, 1.0), (2, 1.0), (4, 1.1), (5, 1.25), (6, 1.4), (8, 1.55), (16, 1.9), (32, 2.6), (64, 4.2)],
    "accelerator": [(1, 1.0), (8, 1.03), (16, 1.06), (32, 1.12), (64, 1.25), (128, 1.6), (256, 2.5)],
}
# Drafting must promise this much more than plain decoding: estimates are noisy and plain decoding is certain
_MARGIN = 1.1
# drafting that takes less than this many plain steps a round is never paused
_NEXT_TO_NOTHING = 0.02


class CostModel:
    """Seconds of a target forward over n nodes a row, from the forwards made so far.

    Measurements are forgotten after a while: a width that was measured in a bad moment would look too dear for ever,
    since it would not be tried again.
    """

    MEMORY = 128  # forwards

    def __init__(self, device_type: str) -> None:
        self._prior = _PRIOR_COST["cpu" if device_type == "cpu" else "accelerator"]
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._last_seen: dict[tuple[int, int], int] = {}
        self._forwards = 0

    def observe(self, batch: int, width: int, seconds: float) -> None:
        """A forward over `width` nodes in each of `batch` rows took this long."""
        key = (batch, width)
        self._samples.setdefault(key, deque(maxlen=9)).append(seconds)
        self._forwards += 1
        self._last_seen[key] = self._forwards
        for old in [old for old, seen in self._last_seen.items() if self._forwards - seen >= self.MEMORY]:
            del self._samples[old], self._last_seen[old]

    def seconds(self, batch: int, width: int) -> float:
        """Expected seconds of such a forward (in units of one plain step while nothing has been measured)."""
        samples = self._samples.get((batch, width), ())
        if len(samples) >= 3:
            return statistics.median(samples)
        scaled = self._from_neighbour(batch, width)
        if not samples:
            return scaled
        return (scaled + min(samples)) / 2

    def _from_neighbour(self, batch: int, width: int) -> float:
        """Scaled from the nearest width measured, by the prior's shape."""
        measured = [
            (abs(other - width), other, samples)
            for (rows, other), samples in self._samples.items()
            if rows == batch and (other != width or len(self._samples) == 1)
        ]
        if not measured:
            return self._prior_ratio(batch * width) / self._prior_ratio(batch)
        _, other, samples = min(measured, key=lambda item: (item[0], item[1]))
        return statistics.median(samples) * self._prior_ratio(batch * width) / self._prior_ratio(batch * other)

    def _prior_ratio(self, tokens: int) -> float:
        points = self._prior
        index = bisect_left(points, (tokens, 0.0))
        if index == len(points):  # beyond the table: as steep as its last step
            (x0, y0), (x1, y1) = points[-2:]
        elif index == 0:
            return points[0][1]
        else:
            (x0, y0), (x1, y1) = points[index - 1], points[index]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class Calibrator:
    """Turns a drafter's confidence into the acceptance it has meant so far (a reliability diagram)."""

    BINS = 20
    PRIOR_WEIGHT = 4.0  # the drafter's own word counts as this many observations
    MEMORY = 100.0  # observations per bin after which old ones fade

    def __init__(self) -> None:
        self._accepted = [0.0] * self.BINS
        self._tried = [0.0] * self.BINS

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self.BINS), self.BINS - 1)

    def probability(self, confidence: float) -> float:
        """Probability that a node of this confidence is accepted once its parent is."""
        index = self._bin(confidence)
        accepted = self._accepted[index] + self.PRIOR_WEIGHT * min(confidence, 0.98)
        return accepted / (self._tried[index] + self.PRIOR_WEIGHT)

    def fade(self, most: float) -> None:
        """Let what was seen count as at most so many observations per bin: another text may be another matter."""
        for index, tried in enumerate(self._tried):
            if tried > most:
                self._accepted[index] *= most / tried
                self._tried[index] = most

    def observe(self, confidence: float, accepted: bool) -> None:
        """A node of this confidence, whose parent was accepted, was accepted itself or not."""
        index = self._bin(confidence)
        if self._tried[index] >= self.MEMORY:
            self._tried[index] *= 0.5
            self._accepted[index] *= 0.5
        self._tried[index] += 1.0
        self._accepted[index] += float(accepted)

    @property
    def observations(self) -> float:
        """How much has been seen, faded as it is."""
        return sum(self._tried)


class Experience:
    """What is known of a mode on a model: kept from call to call, so that a call need not start from nothing.

    Args:
        costs: what forwards cost in this mode: some verify with a part of the model.
    """

    KEPT = 10.0  # observations per bin that an earlier call counts for
    FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # rounds without drafting after drafting has not paid

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.calibrator = Calibrator()
        self.acceptance = 0.5  # of drafts below an accepted node, decaying mean
        self.draft_seconds = 0.0  # per depth drafted, decaying mean
        self.drafting = 0.0  # plain steps that drafting takes a round, decaying mean
        self.gain = 0.0  # tokens that a round promised beyond what its time was worth, decaying mean
        self.paused = 0  # rounds still to go without drafting
        self.next_pause = self.FIRST_PAUSE

    def pause(self) -> None:
        """Go without drafting for a while, each time for longer."""
        self.paused = self.next_pause
        self.next_pause = min(2 * self.next_pause, self.LONGEST_PAUSE)


class Controller(Protocol):
    """Decides how much is drafted and how much of a draft is verified."""

    def budget(self, rooms: Sequence[int], trees: bool) -> Budget:
        """What a drafter may propose; `rooms[b]` is the depth that row b could still commit."""
        ...

    def size(self, draft: Draft, running: Sequence[bool], most_nodes: int) -> Draft:
        """The part of a proposal that is worth verifying; `most_nodes` fit into the cache besides the root.

        Passengers are not weighed: all of them ride, or none where they do not fit. Of a draft that was drawn from q
        nothing is left out for what was drawn: that would bias `rejection`.
        """
        ...

    def observe(
        self, proposal: Draft, verified: Draft, verdict: Verdict, draft_seconds: float, verify_seconds: float | None
    ) -> None:
        """Learn from a round: the whole proposal, the part verified, what came of it, and what it cost.

        No `verify_seconds` where they do not tell what such a forward costs.
        """
        ...


class FixedController:
    """Drafts of a fixed number of tokens: the same every run."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, rooms: Sequence[int], trees: bool) -> Budget:
        depth = [max(0, min(room, self.tokens)) for room in rooms]
        room = [max(0, room) for room in rooms]
        return Budget(depth=depth, room=room, nodes=self.tokens, trees=trees, pays=lambda chains: True)

    def size(self, draft: Draft, running: Sequence[bool], most_nodes: int) -> Draft:
        draft = _seated(draft, most_nodes)
        tokens = min(self.tokens, most_nodes - _passengers(draft))
        if draft.q is not None:
            return _first(draft, running, tokens)
        return draft.keep([_largest(draft, row, tokens) if running[row] else [0] for row in range(draft.batch_size)])

    def observe(self, *args: Any, **kwargs: Any) -> None:
        pass


class AdaptiveController:
    """Sizes every draft by the ratio rule.

    Args:
        experience: what earlier calls have shown; this one adds to it.
        most_tokens: most tokens drafted a row and round.
    """

    LEARNING = 6  # observations before drafting may be given up
    PROBE = 2  # depth drafted after a pause, to see whether the text has changed

    def __init__(self, experience: Experience, most_tokens: int) -> None:
        self.experience = experience
        self.costs = experience.costs
        self.calibrator = experience.calibrator
        self.calibrator.fade(experience.KEPT)
        self.most_tokens = most_tokens
        self._rows = 1
        self._free_only = False

    def budget(self, rooms: Sequence[int], trees: bool) -> Budget:
        self._rows = sum(room >= 0 for room in rooms) or 1
        deepest, experience, self._free_only = self.most_tokens, self.experience, False
        if experience.paused:
            experience.paused -= 1
            self._free_only = experience.paused > 0
            deepest = deepest if self._free_only else min(deepest, self.PROBE)
        elif not self._drafting_pays():
            experience.pause()
            self._free_only = True
        return Budget(
            depth=[max(0, min(room, deepest)) for room in rooms],
            room=[max(0, room) for room in rooms],
            nodes=self.most_tokens,
            trees=trees,
            pays=self._pays,
            cost=self._cost,
            free_only=self._free_only,
        )

    def size(self, draft: Draft, running: Sequence[bool], most_nodes: int) -> Draft:
        if draft.is_empty:
            return draft
        draft = _seated(draft, most_nodes)
        passengers = _passengers(draft)
        if draft.q is not None:
            return _first(draft, running, most_nodes - passengers)
        rows = [row for row in range(draft.batch_size) if running[row]]
        most = min(self.most_tokens, most_nodes - passengers)
        # expected tokens of all rows with the best i drafted nodes each
        expected = [float(len(rows))] + [0.0] * most
        for row in rows:
            probabilities = self._path_probabilities(draft, row)
            reached = sorted((probabilities[node] for node in draft.drafted[row]), reverse=True)[:most]
            for index, probability in enumerate(reached, start=1):
                expected[index] += probability
        expected = list(accumulate(expected))
        widest = min(most, draft.width - 1)
        plain = expected[0] / self.costs.seconds(len(rows), passengers + 1) * _MARGIN
        best, best_rate = 0, plain
        for nodes in range(1, widest + 1):
            rate = expected[nodes] / self.costs.seconds(len(rows), passengers + nodes + 1)
            if rate > best_rate:
                best, best_rate = nodes, rate
        return draft.keep(
            [self._largest_calibrated(draft, row, best) if running[row] else [0] for row in range(draft.batch_size)]
        )

    def observe(
        self, proposal: Draft, verified: Draft, verdict: Verdict, draft_seconds: float, verify_seconds: float | None
    ) -> None:
        if verify_seconds is not None:
            rows = sum(bool(committed) for committed in verdict.committed)
            self.costs.observe(rows, verified.width, verify_seconds)
        depth = max(max(tree.depths(parents)) for parents in proposal.parents)
        if depth and not self._free_only:
            each = draft_seconds / depth
            known = self.experience.draft_seconds
            self.experience.draft_seconds = each if not known else 0.8 * known + 0.2 * each
            self._weigh(verified, verdict, draft_seconds)
        for row, committed in enumerate(verdict.committed):
            self._learn(proposal, row, committed)

    # ------------------------------------------------------------------ expectations

    def _weigh(self, verified: Draft, verdict: Verdict, draft_seconds: float) -> None:
        """Tokens a row that the drafted ones promised, less those that plain steps bring in the time they cost."""
        rows = [row for row, committed in enumerate(verdict.committed) if committed]
        if not rows:
            return
        promised = 0.0
        for row in rows:
            reached = self._path_probabilities(verified, row)
            promised += sum(reached[node] for node in verified.drafted[row])
        plain = self.costs.seconds(len(rows), 1)
        drafting, verifying = draft_seconds / plain, self.costs.seconds(len(rows), verified.width) / plain - 1.0
        gain, experience = promised / len(rows) - drafting - verifying, self.experience
        experience.gain += 0.1 * (gain - experience.gain)
        experience.drafting += (0.2 if experience.drafting else 1.0) * (drafting - experience.drafting)

    def _path_probabilities(self, draft: Draft, row: int) -> list[float]:
        confidence = draft.confidence[row] if draft.confidence is not None else [0.5] * len(draft.tokens[row])
        return tree.path_probabilities(draft.parents[row], [self.calibrator.probability(c) for c in confidence])

    def _largest_calibrated(self, draft: Draft, row: int, nodes: int) -> list[int]:
        reached = self._path_probabilities(draft, row)
        order = sorted(draft.drafted[row], key=lambda node: (-reached[node], node))
        return _with_passengers(draft, row, order[:nodes])

    def _learn(self, proposal: Draft, row: int, committed: Sequence[int]) -> None:
        """Every drafted child of a committed node was right or wrong, whether it was verified or not."""
        if proposal.confidence is None:
            return
        node = 0
        for token in committed:
            below = proposal.children[row][node]
            for child in below:
                self.calibrator.observe(proposal.confidence[row][child], proposal.tokens[row][child] == token)
            right = [child for child in below if proposal.tokens[row][child] == token]
            if below and not self._free_only:
                self.experience.acceptance += 0.15 * (bool(right) - self.experience.acceptance)
            if not right:
                return
            node = right[0]

    def _cost(self, width: int) -> float:
        """Plain steps that a forward over `width` nodes a row takes."""
        return self.costs.seconds(self._rows, width) / self.costs.seconds(self._rows, 1)

    # ------------------------------------------------------------------ drafters that pay per token

    def _pays(self, chains: Sequence[Sequence[float]]) -> bool:
        """Whether one more token on each of these chains of confidences is worth drafting and verifying."""
        rows, length = len(chains), max(map(len, chains), default=0)
        expected, reached, conditional = float(rows), 0.0, 0.0
        for chain in chains:
            probabilities = [self.calibrator.probability(confidence) for confidence in chain]
            products = list(accumulate(probabilities, lambda a, b: a * b))
            expected += sum(products)
            reached += products[-1] if products else 1.0
            conditional += probabilities[-1] if probabilities else self.experience.acceptance
        conditional /= rows
        draft_seconds = self.experience.draft_seconds
        spent = self.costs.seconds(self._rows, length + 1) + length * draft_seconds
        rate = expected / spent
        gain = 0.0
        for ahead in range(1, 5):  # costs are a staircase: a step up may pay with what comes after it
            reached *= conditional
            gain += reached
            later = self.costs.seconds(self._rows, length + 1 + ahead) + (length + ahead) * draft_seconds
            if later <= spent or gain / (later - spent) > rate:
                return True
        return False

    def _drafting_pays(self) -> bool:
        """Whether drafting is worth its time, for drafters whose drafts cost any.

        Either because what is verified of them, chosen round by round, brings in more than it costs; or because the
        best length for drafts that are all alike is above zero.
        """
        if self.calibrator.observations < self.LEARNING or self.experience.drafting < _NEXT_TO_NOTHING:
            return True
        if self.experience.gain > 0.0:
            self.experience.next_pause = self.experience.FIRST_PAUSE
            return True
        plain = self.costs.seconds(self._rows, 1)
        draft_seconds = self.experience.draft_seconds
        acceptance, reached, expected = self.experience.acceptance, 1.0, 1.0
        for length in range(1, self.most_tokens + 1):
            reached *= acceptance
            expected += reached
            seconds = self.costs.seconds(self._rows, length + 1) + length * draft_seconds
            if expected / seconds > _MARGIN / plain:
                self.experience.next_pause = self.experience.FIRST_PAUSE
                return True
        return False


def _first(draft: Draft, running: Sequence[bool], nodes: int) -> Draft:
    """The first `nodes` drafted nodes of every running row: a cut that does not depend on what was drawn."""
    return draft.keep(
        [
            list(range(min(nodes + 1, len(tokens)))) if runs else [0]
            for tokens, runs in zip(draft.tokens, running, strict=True)
        ]
    )


def _largest(draft: Draft, row: int, nodes: int) -> list[int]:
    """The best `nodes` drafted nodes of a row by the drafter's own confidence, the root and the passengers."""
    confidence = draft.confidence[row] if draft.confidence is not None else [1.0] * len(draft.tokens[row])
    drafted = set(draft.drafted[row])
    best = [node for node in tree.best_first(draft.parents[row], confidence) if node in drafted]
    return _with_passengers(draft, row, best[:nodes])


def _with_passengers(draft: Draft, row: int, nodes: Sequence[int]) -> list[int]:
    riding = [] if draft.passenger is None else [node for node, rides in enumerate(draft.passenger[row]) if rides]
    return sorted({0, *nodes, *riding})


def _passengers(draft: Draft) -> int:
    """Passengers of the row that has the most."""
    return max(map(sum, draft.passenger)) if draft.passenger is not None else 0


def _seated(draft: Draft, most_nodes: int) -> Draft:
    """The draft, without its passengers where they do not fit."""
    if _passengers(draft) <= most_nodes:
        return draft
    return draft.keep([[0, *drafted] for drafted in draft.drafted])


_experiences: WeakKeyDictionary[Any, dict[tuple, Experience]] = WeakKeyDictionary()


def experience_of(model: Any, mode: str) -> Experience:
    """What is known of this mode on this model, on its device and in its dtype."""
    key = (str(model.device), model.dtype, torch.get_num_threads(), mode)
    return _experiences.setdefault(model, {}).setdefault(key, Experience(CostModel(model.device.type)))
