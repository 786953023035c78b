"""How large a draft pays here: what forwards cost, how often drafts hold, and the ratio rule that weighs the two.

A round over n nodes commits E(n) tokens in T(n) seconds. The size that maximises E / T is taken; zero is a size
(Sequoia, arXiv:2402.12374, section 3.3). T is measured in the run itself: it is a staircase that differs between
machines, batches and dtypes. E follows from the drafters' confidences, corrected by what became of earlier ones.
Outputs never depend on any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from .. import tree
from ..draft import Budget, Draft, Verdict
from .experience import Experience
from .sizing import count_passengers, drop_excess_passengers, first_nodes, most_confident, with_passengers

# Drafting must promise this much more than plain decoding: estimates are noisy and plain decoding is certain
_MARGIN = 1.1
# drafting that takes less than this many plain steps per round is never paused
_NEXT_TO_NOTHING = 0.02
# tokens that are read again before a draft of a fixed size is left out once, so that a recurrent state catches up
_MOST_REPLAYED = 16
# rounds for which replayed tokens are thought to be carried on, where a draft is hardly ever kept whole
_MOST_CARRIED = 8.0


class Controller(Protocol):
    """Decides how much is drafted and how much of a draft is verified."""

    def budget(self, rooms: Sequence[int], trees: bool, replayed: int | None = None) -> Budget:
        """What a drafter may propose.

        Args:
            rooms: per row, the depth that it could still commit.
            trees: whether drafts may branch.
            replayed: tokens per row that the next forward reads again; None where nothing is ever read again.
        """
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

    def budget(self, rooms: Sequence[int], trees: bool, replayed: int | None = None) -> Budget:
        tokens = 0 if (replayed or 0) > _MOST_REPLAYED else self.tokens
        depth = [max(0, min(room, tokens)) for room in rooms]
        room = [max(0, room) for room in rooms]
        return Budget(depth=depth, room=room, nodes=self.tokens, trees=trees, pays=lambda chains: True)

    def size(self, draft: Draft, running: Sequence[bool], most_nodes: int) -> Draft:
        draft = drop_excess_passengers(draft, most_nodes)
        tokens = min(self.tokens, most_nodes - count_passengers(draft))
        if draft.q is not None:
            return first_nodes(draft, running, tokens)
        return draft.keep(
            [most_confident(draft, row, tokens) if running[row] else [0] for row in range(draft.batch_size)]
        )

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
        self._replayed: int | None = None

    def budget(self, rooms: Sequence[int], trees: bool, replayed: int | None = None) -> Budget:
        self._rows, self._replayed = sum(room >= 0 for room in rooms) or 1, replayed
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
        draft = drop_excess_passengers(draft, most_nodes)
        riding = count_passengers(draft)
        if draft.q is not None:
            return first_nodes(draft, running, most_nodes - riding)
        rows = [row for row in range(draft.batch_size) if running[row]]
        most = min(self.most_tokens, most_nodes - riding)
        # expected tokens of all rows with the best i drafted nodes each; the chance that all rows keep all of them
        expected = [float(len(rows))] + [0.0] * most
        whole = [1.0] * (most + 1)
        for row in rows:
            probabilities = self._path_probabilities(draft, row)
            reached = sorted((probabilities[node] for node in draft.drafted[row]), reverse=True)[:most]
            for index, probability in enumerate(reached, start=1):
                expected[index] += probability
                whole[index] *= probability
        expected = list(accumulate(expected))
        widest = min(most, draft.width - 1)
        plain = expected[0] / self._seconds(len(rows), riding + 1) * _MARGIN
        best, best_rate = 0, plain
        for nodes in range(1, widest + 1):
            seconds = self._seconds(len(rows), riding + nodes + 1)
            seconds += self._carried(len(rows), nodes + 1, expected[nodes] / len(rows), whole[nodes])
            rate = expected[nodes] / seconds
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
            self.costs.observe(rows, verified.width + (self._replayed or 0), verify_seconds)
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
        drafting, verifying = draft_seconds / plain, self._seconds(len(rows), verified.width) / plain - 1.0
        gain, experience = promised / len(rows) - drafting - verifying, self.experience
        experience.gain += 0.1 * (gain - experience.gain)
        experience.drafting += (0.2 if experience.drafting else 1.0) * (drafting - experience.drafting)

    def _path_probabilities(self, draft: Draft, row: int) -> list[float]:
        confidence = [self.calibrator.probability(value) for value in self._confidence(draft, row)]
        return tree.path_probabilities(draft.parents[row], confidence)

    @staticmethod
    def _confidence(draft: Draft, row: int) -> Sequence[float]:
        """The drafter's own word; where it says nothing, every node is as likely as not until it has been seen."""
        return draft.confidence[row] if draft.confidence is not None else [0.5] * len(draft.tokens[row])

    def _largest_calibrated(self, draft: Draft, row: int, nodes: int) -> list[int]:
        reached = self._path_probabilities(draft, row)
        order = sorted(draft.drafted[row], key=lambda node: (-reached[node], node))
        return with_passengers(draft, row, order[:nodes])

    def _learn(self, proposal: Draft, row: int, committed: Sequence[int]) -> None:
        """Every drafted child of a committed node was right or wrong, whether it was verified or not."""
        confidence = self._confidence(proposal, row)
        node = 0
        for token in committed:
            below = proposal.children[row][node]
            for child in below:
                self.calibrator.observe(confidence[child], proposal.tokens[row][child] == token)
            right = [child for child in below if proposal.tokens[row][child] == token]
            if below and not self._free_only:
                self.experience.acceptance += 0.15 * (bool(right) - self.experience.acceptance)
            if not right:
                return
            node = right[0]

    def _seconds(self, rows: int, width: int) -> float:
        """Seconds of the next forward over `width` nodes per row of its own."""
        return self.costs.seconds(rows, width + (self._replayed or 0))

    def _carried(self, rows: int, width: int, kept: float, whole: float) -> float:
        """Seconds that later forwards will take longer, where a draft that is not kept whole must be read again.

        What is pending is carried on, `kept` tokens more, until a draft is kept whole.

        Args:
            rows: that are running.
            width: nodes per row of the draft.
            kept: tokens expected per row.
            whole: chance that all rows keep all of it.
        """
        if self._replayed is None:
            return 0.0
        rounds = min((1.0 - whole) / max(whole, 1e-6), _MOST_CARRIED)
        pending = round(self._replayed + kept)
        return rounds * max(0.0, self.costs.seconds(rows, width + pending) - self.costs.seconds(rows, width))

    def _cost(self, width: int) -> float:
        """Plain steps that a forward over `width` nodes per row takes."""
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
        spent = self._seconds(self._rows, length + 1) + length * draft_seconds
        rate = expected / spent
        gain = 0.0
        for ahead in range(1, 5):  # costs are a staircase: a step up may pay with what comes after it
            reached *= conditional
            gain += reached
            later = self._seconds(self._rows, length + 1 + ahead) + (length + ahead) * draft_seconds
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
