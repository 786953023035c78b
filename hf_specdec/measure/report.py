"""What a benchmark measures and reports: values, and pure functions that add them up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..generation import NO_MODE

PLAIN = "plain"
OVERALL = "overall"


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Prompt:
    """What the user says, and the kind of task it stands for."""

    text: str
    task: str = "prompts"


@dataclass(frozen=True)
class Batch:
    """Prompts of one task that go through `generate` together."""

    task: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Case:
    """A way of generating: its name and the arguments that `generate` gets for it."""

    name: str
    arguments: Mapping[str, Any]
    # whether its output ought to be plain decoding's, token for token
    promises_plain: bool = True
    # errors that mean it cannot run here, so that it is skipped; others are raised
    refusals: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A case that was not run, and why."""

    case: str
    reason: str


@dataclass(frozen=True)
class Settings:
    """What all cases of a run have in common."""

    max_new_tokens: int = 128
    batch_size: int = 1
    repeats: int = 3
    # every call starts from this seed, so that sampling gives the same text again
    seed: int = 0
    # sampling parameters; greedy decoding where both are None
    temperature: float | None = None
    top_p: float | None = None
    # drafted tokens per round, in every mode; None leaves it to the mode
    num_draft_tokens: int | None = None

    @property
    def samples(self) -> bool:
        return self.temperature is not None or self.top_p is not None


@dataclass(frozen=True)
class Environment:
    """What was run on what."""

    model: str
    assistant: str | None
    dtype: str
    device: str
    threads: int
    torch: str
    transformers: str
    hf_specdec: str

    @property
    def setting(self) -> str:
        """Model and machine in a few words."""
        assistant = f" with {self.assistant}" if self.assistant else ""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.model}{assistant}, {self.dtype}, {self.device}, {threads}"


# ---------------------------------------------------------------- what comes out


@dataclass(frozen=True)
class Measurement:
    """One timed `generate` call."""

    case: str
    task: str
    batch: int
    repeat: int
    seconds: float
    rows: int
    # generated tokens over all rows, a row's EOS included and the padding after it not
    tokens: int
    # rows that are not what plain decoding gave for this batch
    differing_rows: int
    # accepted drafted tokens and rounds, each over all rows; None where hf_specdec did not decode
    accepted: int | None = None
    rounds: int | None = None


@dataclass(frozen=True)
class Summary:
    """What one case did on one task, or overall."""

    task: str
    case: str
    rows: int
    tokens: int
    # sum over batches of the median over repeats
    seconds: float
    tokens_per_second: float
    # plain decoding's seconds / this case's: of the sums, and the median over batches
    ratio: float
    median_ratio: float
    # tokens per row and round, the recovered or bonus token included; None where it is not known
    mean_acceptance_length: float | None
    differing_rows: int

    @property
    def identical(self) -> bool:
        """Whether every row of every repeat was plain decoding's."""
        return self.differing_rows == 0


@dataclass(frozen=True)
class Report:
    """A whole run: every call that was timed, and what it was timed under."""

    environment: Environment
    settings: Settings
    cases: tuple[Case, ...]
    measurements: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...] = ()
    summaries: tuple[Summary, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "summaries", tuple(summarize(self.measurements)))

    @property
    def modes_ran(self) -> list[str]:
        """Names of the cases in which hf_specdec decoded."""
        return [case.name for case in self.cases if case.arguments.get("speculative_mode", NO_MODE) != NO_MODE]

    @property
    def broken_promises(self) -> list[str]:
        """Names of the cases whose output ought to be plain decoding's and was not."""
        differing = {summary.case for summary in self.summaries if not summary.identical}
        return [case.name for case in self.cases if case.promises_plain and case.name in differing]

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps(
            {
                "environment": asdict(self.environment),
                "settings": asdict(self.settings),
                "summaries": [asdict(summary) | {"identical": summary.identical} for summary in self.summaries],
                "skipped": [asdict(skipped) for skipped in self.skipped],
                "measurements": [asdict(measurement) for measurement in self.measurements],
            },
            indent=2,
        )


# ---------------------------------------------------------------- aggregation: pure


def count_tokens(rows: Iterable[Sequence[int]], eos: Iterable[int]) -> int:
    """Generated tokens of all rows; what follows a row's first EOS is padding."""
    ends = set(eos)
    return sum(next((index + 1 for index, token in enumerate(row) if token in ends), len(row)) for row in rows)


def count_differing(rows: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> int:
    """Rows that are not plain decoding's, padding included."""
    return sum(list(row) != list(expected) for row, expected in zip(rows, plain, strict=True))


def summarize(measurements: Sequence[Measurement]) -> list[Summary]:
    """A summary for every task and case, and where there are several tasks, for every case overall."""
    tasks = list(dict.fromkeys(measurement.task for measurement in measurements))
    summaries = [
        summary
        for task in tasks
        for summary in _summarize_task(task, [measurement for measurement in measurements if measurement.task == task])
    ]
    return summaries + (_summarize_task(OVERALL, measurements) if len(tasks) > 1 else [])


def _summarize_task(task: str, measurements: Sequence[Measurement]) -> list[Summary]:
    by_case: dict[str, dict[int, list[Measurement]]] = {}
    for measurement in measurements:
        by_case.setdefault(measurement.case, {}).setdefault(measurement.batch, []).append(measurement)
    plain = _median_seconds(by_case[PLAIN])
    return [_summarize_case(task, case, batches, plain) for case, batches in by_case.items()]


def _summarize_case(
    task: str, case: str, batches: Mapping[int, Sequence[Measurement]], plain: Mapping[int, float]
) -> Summary:
    seconds = _median_seconds(batches)
    tokens = sum(runs[0].tokens for runs in batches.values())
    length = 1.0 if case == PLAIN else _acceptance_length([run for runs in batches.values() for run in runs])
    return Summary(
        task=task,
        case=case,
        rows=sum(runs[0].rows for runs in batches.values()),
        tokens=tokens,
        seconds=sum(seconds.values()),
        tokens_per_second=tokens / sum(seconds.values()),
        ratio=sum(plain[batch] for batch in seconds) / sum(seconds.values()),
        median_ratio=statistics.median(plain[batch] / seconds[batch] for batch in seconds),
        mean_acceptance_length=length,
        differing_rows=sum(max(run.differing_rows for run in runs) for runs in batches.values()),
    )


def _median_seconds(batches: Mapping[int, Sequence[Measurement]]) -> dict[int, float]:
    return {batch: statistics.median(run.seconds for run in runs) for batch, runs in batches.items()}


def _acceptance_length(runs: Sequence[Measurement]) -> float | None:
    counted = [(run.accepted, run.rounds) for run in runs if run.accepted is not None and run.rounds is not None]
    if not counted:
        return None
    accepted, rounds = (sum(column) for column in zip(*counted, strict=True))
    return (accepted + rounds) / rounds if rounds else 1.0
