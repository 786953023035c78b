"""What forwards of the target cost here, measured in the run itself."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque

# Cost of a forward over n tokens relative to one token, until it has been measured (tokens of all rows)
_PRIOR_COST = {
    "cpu": [(1, 1.0), (2, 1.0), (4, 1.1), (5, 1.25), (6, 1.4), (8, 1.55), (16, 1.9), (32, 2.6), (64, 4.2)],
    "accelerator": [(1, 1.0), (8, 1.03), (16, 1.06), (32, 1.12), (64, 1.25), (128, 1.6), (256, 2.5)],
}


class CostModel:
    """Seconds of a target forward over n nodes per row, from the forwards made so far.

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
