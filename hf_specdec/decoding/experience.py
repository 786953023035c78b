"""What is known of a mode on a model: what its forwards cost, and what its drafters' confidences have meant."""

from __future__ import annotations

from typing import Any

from ..host.models import execution_device
from ..memory import remembered, state_of
from .cost import CostModel


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


def experience_of(model: Any, mode: str) -> Experience:
    """What is known of this mode on this model in its state: device, dtype, threads, adapters, hooks."""
    key = (mode, state_of(model))
    return remembered(model, "experience", key, lambda: Experience(CostModel(execution_device(model).type)))
