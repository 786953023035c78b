"""The demo: three prompts that offer much, something and little to copy, and a chart of what speculation gained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import OVERALL, PLAIN, Prompt, Report

_CODE = '''\
class Inventory:
    """Counts the parts on the shelves of a small workshop."""

    def __init__(self, owner):
        self.owner = owner
        self.parts = {}

    def add(self, name, count=1):
        if count < 1:
            raise ValueError("count must be at least 1")
        self.parts[name] = self.parts.get(name, 0) + count
        return self.parts[name]

    def take(self, name, count=1):
        available = self.parts.get(name, 0)
        if available < count:
            raise KeyError(f"only {available} of {name} left")
        self.parts[name] = available - count
        return self.parts[name]

    def total(self):
        return sum(self.parts.values())

    def report(self):
        for name, count in sorted(self.parts.items()):
            print(f"{name}: {count}")
'''

_PASSAGE = """\
The lighthouse at Grey Point was built in 1874, after three fishing boats were lost on the reef in a single winter. \
Its first keeper, Maren Holt, lived there with her two brothers and kept a diary of every storm. The lamp burned rape \
oil at first and was changed to paraffin in 1891, which made the light twice as bright and halved the cost. In 1923 a \
fog signal was added; it could be heard eleven miles away, and the sheep on the island never got used to it. The tower \
was struck by lightning in 1938, and the repairs took most of the following year. During the war the lamp stayed dark, \
and the keepers grew vegetables in the garden behind the wall. Electric light came in 1956, when a cable was laid from \
the village across the sound. The last keeper left in the autumn of 1987, and since then the light has been watched \
from a control room on the mainland. Today the tower is open to visitors on Sundays in summer, and the diary of Maren \
Holt lies under glass in the entrance hall.
"""

PROMPTS = (
    Prompt(
        f"Here is a Python class:\n\n```python\n{_CODE}```\n\nWrite the same class again, unchanged.", task="copying"
    ),
    Prompt(
        f"{_PASSAGE}\nWhat happened to the lighthouse from 1923 on? Answer by quoting the sentences of the passage "
        "that say it, word for word.",
        task="quoting",
    ),
    Prompt("What makes a good teacher? Give your own view and explain it.", task="open"),
)

# Okabe and Ito's colours, which colour-blind people tell apart; grey is left to what is not ours
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREYS = ("#8A8A8A", "#BDBDBD")


def draw_chart(report: Report, path: Path) -> None:
    """Write a PNG of each case's speed relative to plain decoding, in groups of bars per task."""
    # no pyplot: it would choose a window system and keep the figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ratios: dict[str, dict[str, float]] = {}
    for summary in report.summaries:
        if summary.task != OVERALL and summary.case != PLAIN:
            ratios.setdefault(summary.case, {})[summary.task] = summary.ratio
    tasks = list(dict.fromkeys(summary.task for summary in report.summaries if summary.task != OVERALL))
    width = 0.8 / max(len(ratios), 1)
    inches = max(7.0, 1.0 + 0.75 * len(tasks) * len(ratios))
    figure = Figure(figsize=(inches, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    ours, others = iter(_COLOURS * (1 + len(ratios))), iter(_GREYS * (1 + len(ratios)))
    for index, (case, by_task) in enumerate(ratios.items()):
        bars = axes.bar(
            [place + (index - (len(ratios) - 1) / 2) * width for place in range(len(tasks))],
            [by_task[task] for task in tasks],
            width * 0.92,
            label=case.replace("_", " "),
            color=next(others if case.startswith("transformers") else ours),
        )
        labels = axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        for label in labels:  # legible on the line at 1.0 too
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle="--", label="plain generate()")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_xlim(-0.55, len(tasks) - 0.45)
    axes.set_ylabel("times as fast")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.grid(True, color="#E5E5E5")
    axes.set_axisbelow(True)
    settings = report.settings
    caution = f" (the output of {', '.join(report.broken_promises)} differs)" if report.broken_promises else ""
    figure.suptitle(f"Speed relative to plain generate(){caution}", fontsize=13)
    axes.set_title(
        f"{report.environment.setting}, {settings.max_new_tokens} new tokens, median of {settings.repeats}",
        fontsize=8,
        color="#555555",
    )
    figure.legend(loc="outside lower center", ncols=int(inches / 1.9), frameon=False, fontsize=9)
    figure.savefig(path)
