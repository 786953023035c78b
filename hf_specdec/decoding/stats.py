"""What speculation did: every figure is defined here, once.

A *round* is one target forward after the prompt's. In every round each running row commits its accepted drafted
tokens and one more: the *recovered* token that replaces the first rejected one, or the *bonus* token after a draft that
was accepted whole. So plain decoding has a mean acceptance length of exactly 1.0.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..draft import Draft, Verdict


@dataclass
class RowStats:
    """One row of one call (or the sum over rows)."""

    # tokens committed, the one from the prompt's forward included
    tokens: int = 0
    # rounds this row took part in
    rounds: int = 0
    # drafted tokens that were verified, and those of them that were committed
    drafted: int = 0
    accepted: int = 0
    # accepted drafted tokens in a round -> number of rounds
    histogram: Counter[int] = field(default_factory=Counter)
    # depth (1 = first drafted token) -> rounds whose draft reached it, and whose accepted path did
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per round, the recovered or bonus token included; 1.0 for plain decoding."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Part of the verified drafted tokens that was committed; 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def acceptance_by_depth(self) -> dict[int, float]:
        """Part of the drafts reaching a depth whose path was accepted down to it."""
        return {depth: self.accepted_by_depth[depth] / count for depth, count in sorted(self.drafted_by_depth.items())}

    def add(self, other: RowStats) -> None:
        """Add another row's counts to these."""
        for name in ("tokens", "rounds", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("histogram", "drafted_by_depth", "accepted_by_depth"):
            getattr(self, name).update(getattr(other, name))


@dataclass
class SpeculationStats:
    """Statistics of one `generate` call, or of several added up (see `record`)."""

    mode: str = ""
    # whether the acceptance rule keeps the output of plain decoding
    lossless: bool = True
    calls: int = 0
    # forwards of the target model: the prompts', then one a round
    prompt_forwards: int = 0
    rounds: int = 0
    # forwards after the last round, by which a returned cache with recurrent states read what was still pending
    catch_up_forwards: int = 0
    # tokens that recurrent states read again after a rejected draft, over all rows (in forwards that ran anyway)
    replayed: int = 0
    # seconds spent making drafts, verifying them (forward and walk's first read), and on everything else
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    rows: list[RowStats] = field(default_factory=list)
    # width of a verification forward (nodes per row, root and replayed tokens included) -> number of rounds
    widths: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> RowStats:
        """The sum over all rows."""
        total = RowStats()
        for row in self.rows:
            total.add(row)
        return total

    @property
    def target_forwards(self) -> int:
        """Forwards of the target model, those over the prompts included."""
        return self.prompt_forwards + self.rounds + self.catch_up_forwards

    @property
    def tokens(self) -> int:
        """Tokens committed over all rows."""
        return sum(row.tokens for row in self.rows)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per row and round, the recovered or bonus token included; 1.0 for plain decoding."""
        return self.total.mean_acceptance_length

    @property
    def acceptance_rate(self) -> float:
        """Part of the verified drafted tokens that was committed."""
        return self.total.acceptance_rate

    @property
    def histogram(self) -> Counter[int]:
        """Accepted drafted tokens in a round -> number of rounds, over all rows."""
        return self.total.histogram

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the decoding loop."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def acceptance_by_depth(self) -> dict[int, float]:
        """Part of the drafts reaching a depth whose path was accepted down to it, over all rows."""
        return self.total.acceptance_by_depth()

    def record_round(self, draft: Draft, verdict: Verdict, replayed: int = 0) -> None:
        """Count one round, in which every row of the forward read so many tokens again."""
        self.rounds += 1
        self.widths[draft.width + replayed] += 1
        self.replayed += replayed * draft.batch_size
        for row, committed in enumerate(verdict.committed):
            if not committed:
                continue
            stats, accepted = self.rows[row], verdict.accepted[row]
            stats.rounds += 1
            stats.tokens += len(committed)
            stats.accepted += accepted
            stats.histogram[accepted] += 1
            below = draft.children[row]
            stats.drafted += sum(len(children) for children in below)
            level, depth = below[0], 0
            while level:
                depth += 1
                stats.drafted_by_depth[depth] += 1
                level = [child for node in level for child in below[node]]
            for depth in range(1, accepted + 1):
                stats.accepted_by_depth[depth] += 1

    def add(self, other: SpeculationStats) -> None:
        """Add another call's figures to these."""
        self.mode = other.mode if self.mode in ("", other.mode) else "mixed"
        self.lossless = self.lossless and other.lossless
        for name in (
            "calls",
            "prompt_forwards",
            "rounds",
            "catch_up_forwards",
            "replayed",
            "draft_seconds",
            "verify_seconds",
            "other_seconds",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.widths.update(other.widths)
        self.rows.extend(other.rows)

    def summary(self) -> dict[str, Any]:
        """The main figures as a flat dictionary, for logging."""
        return {
            "mode": self.mode,
            "calls": self.calls,
            "tokens": self.tokens,
            "target_forwards": self.target_forwards,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "replayed": self.replayed,
            "draft_seconds": round(self.draft_seconds, 4),
            "verify_seconds": round(self.verify_seconds, 4),
            "other_seconds": round(self.other_seconds, 4),
        }


_recorders: list[SpeculationStats] = []
_lock = threading.Lock()


@contextmanager
def record() -> Iterator[SpeculationStats]:
    """Collect the statistics of every speculative `generate` call inside, whatever thread it runs in.

    ```python
    with hf_specdec.record() as stats:
        pipe(prompts, speculative_mode="prompt_lookup")
    print(stats.mean_acceptance_length)
    ```
    """
    stats = SpeculationStats()
    with _lock:
        _recorders.append(stats)
    try:
        yield stats
    finally:
        with _lock:
            _recorders[:] = [recorder for recorder in _recorders if recorder is not stats]


def publish(stats: SpeculationStats) -> None:
    """Give a finished call's statistics to every open `record()`."""
    with _lock:
        for recorder in _recorders:
            recorder.add(stats)
