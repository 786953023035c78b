"""What the measuring commands show on the terminal: a progress bar, and a report as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what measures is imported when something is measured
    from ..measure.bench import Progress
    from ..measure.report import Report


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr, with the time that is left; in a file or a pipe, a line at every tenth."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from transformers.utils import logging

    # It is drawn between runs only: a thread that redraws it would take time from what is measured. Runs may be minutes
    # apart, so the speed is estimated over an hour.
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        speed_estimate_period=3600,
        transient=True,
    )
    task = bar.add_task("", total=None)
    started, tenths = perf_counter(), 0

    def step(done: int, total: int, label: str) -> None:
        nonlocal tenths
        bar.update(task, completed=done, total=total, description=label, refresh=True)
        if not console.is_terminal and 10 * done // total > tenths:
            tenths = 10 * done // total
            minutes = (perf_counter() - started) / 60
            print(f"{done} of {total} runs, {minutes:.1f} minutes", file=sys.stderr, flush=True)

    shows_own = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # transformers' bars would be drawn across this one
    try:
        with bar:
            yield step
    finally:
        if shows_own:
            logging.enable_progress_bar()


def show(report: Report, title: str, first_column: str) -> None:
    """Print a report as a table, and under it what was skipped and what differs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file or a pipe has no width
    # where every task is one batch, the median over batches says nothing new
    several = len({m.batch for m in report.measurements}) > len({m.task for m in report.measurements})
    table = Table(title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column(first_column)
    table.add_column("mode", no_wrap=True)
    for column in ("tokens/s", "ratio\nto plain", *(["median\nratio"] if several else []), "mean accep-\ntance length"):
        table.add_column(column, justify="right")
    table.add_column("identical")
    task = None
    for summary in report.summaries:
        if task not in (None, summary.task):
            table.add_section()
        length = summary.mean_acceptance_length
        alarm = "[red]" if summary.case in report.broken_promises else ""
        table.add_row(
            summary.task if summary.task != task else "",
            summary.case,
            f"{summary.tokens_per_second:.1f}",
            f"{summary.ratio:.2f}",
            *([f"{summary.median_ratio:.2f}"] if several else []),
            "-" if length is None else f"{length:.2f}",
            "[green]yes" if summary.identical else f"{alarm}no: {summary.differing_rows} of {summary.rows} rows",
        )
        task = summary.task
    console.print(table)
    plainly: dict[str, Any] = {"highlight": False, "markup": False}
    environment = report.environment
    console.print(
        f"{environment.setting}, torch {environment.torch}, transformers {environment.transformers}, "
        f"median of {report.settings.repeats}",
        style="dim",
        **plainly,
    )
    for skipped in report.skipped:
        console.print(f"Skipped {skipped.case}: {skipped.reason}", **plainly)
    if report.broken_promises:
        verdict = f"The output differs from plain decoding: {', '.join(report.broken_promises)}."
        if environment.dtype != "float32":
            verdict += (
                f" In {environment.dtype} a forward over several tokens rounds differently from one over a single "
                "token, so two tokens that score nearly the same may change places."
            )
        console.print(verdict, style="red", **plainly)
