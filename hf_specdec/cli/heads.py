"""The command line's part about trained heads: `hf-specdec evaluate-heads`, `convert` and `card`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError, ConfigurationError, SpeculationError
from .arguments import Help

if TYPE_CHECKING:
    from ..heads import HeadConfig

_PEFT = "peft"


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    _add_evaluate(commands)
    _add_convert(commands)
    _add_card(commands)


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate-heads",
        help="count how well heads predict a model's answers, and write it into their model card",
        description="Let the base model answer prompts greedily, once, and count along its answers how often each head "
        "is right, and what the kind of heads counts besides: for heads that draft trees from the last hidden state, "
        "the tokens per forward with trees of several sizes. Speed is measured by `bench`.",
        formatter_class=Help,
    )
    evaluate.add_argument("adapter", type=Path, metavar="ADAPTER", help="folder of the heads")
    evaluate.add_argument(
        "--data", required=True, type=Path, metavar="FILE", help="JSON Lines of prompts, as for bench"
    )
    evaluate.add_argument("--base", metavar="MODEL", help="the base model (default: the one that the heads name)")
    evaluate.add_argument(
        "--nodes", type=int, nargs="+", metavar="N", help="drafted nodes of the trees (default: 2 7 15 31 63)"
    )
    evaluate.add_argument("--max-new-tokens", type=int, metavar="N", default=128, help="most tokens of an answer")
    evaluate.add_argument("--per-task", type=int, metavar="N", help="most prompts of a task (default: all)")
    evaluate.add_argument("--batch-size", type=int, metavar="N", default=10, help="prompts answered at once")
    evaluate.add_argument("--repo", metavar="NAME/HEADS", help="the repository that the card's example loads from")
    evaluate.add_argument("--device", metavar="DEVICE", help="where to run (default: cuda if there is one, else cpu)")
    evaluate.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    evaluate.set_defaults(run=_evaluate)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="turn other projects' heads into an adapter, or an adapter into what vLLM serves",
        description="Read heads in another project's format and write them as a PEFT adapter; or, with --to, read an "
        "adapter, write what another project loads, and print how it is used there (vllm: the command that serves it).",
        formatter_class=Help,
    )
    convert.add_argument("source", metavar="SOURCE", help="a folder or a Hub id")
    convert.add_argument("output", type=Path, metavar="OUTPUT", help="folder to write")
    convert.add_argument("--to", metavar="FORMAT", default=_PEFT, help="what to write: peft, or vllm and others")
    convert.add_argument("--base", metavar="MODEL", help="the base model (default: the one that the source names)")
    convert.set_defaults(run=_convert)


def _add_card(commands: Any) -> None:
    card = commands.add_parser(
        "card",
        help="write what heads were measured to bring into their model card",
        description="Take the figures of `hf-specdec bench --adapter ... --json FILE`, one file for each column, into "
        "an adapter's provenance, and make its model card anew.",
        formatter_class=Help,
    )
    card.add_argument("adapter", type=Path, metavar="ADAPTER", help="folder of the heads")
    card.add_argument("--bench", nargs="+", type=Path, required=True, metavar="FILE", help="reports of `bench --json`")
    card.add_argument(
        "--columns", nargs="+", metavar="NAME", help="what to call each report (default: its file's name)"
    )
    card.add_argument("--repo", metavar="NAME/HEADS", help="the repository that the card's example loads from")
    card.set_defaults(run=_card)


# ---------------------------------------------------------------- commands


def _evaluate(arguments: argparse.Namespace) -> int:
    import torch

    from ..heads import kind_of
    from ..heads.card import evaluation_tables
    from ..measure.loading import load_adapter, load_model, load_tokenizer
    from ..training import evaluate_heads

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    settings = _settings_of(str(arguments.adapter))
    kind, base = kind_of(settings), _base_of(settings, arguments.base)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(base, "float32" if device == "cpu" else "bfloat16", device)
    load_adapter(model, str(arguments.adapter))
    found = evaluate_heads(
        model,
        load_tokenizer(base),
        arguments.data,
        nodes=arguments.nodes,
        max_new_tokens=arguments.max_new_tokens,
        per_task=arguments.per_task,
        batch_size=arguments.batch_size,
    )
    for number, head in enumerate(found.heads, start=1):
        print(f"{kind.head_name.format(number=number)}: top-1 {head['top1']:.3f}, top-10 {head['top10']:.3f}")
    for title, table in evaluation_tables(kind, found.to_dict()):
        print(f"\n{title}:\n\n{table}")
    print()
    _note(arguments.adapter, settings, arguments.repo, evaluation=found.to_dict())
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from ..heads import find_heads, kind_of
    from ..heads.formats import convert, export, formats
    from ..measure.loading import load_adapter, load_model

    if arguments.to == _PEFT:
        config = convert(arguments.source, arguments.output, arguments.base)
        base_name = config.base_model_name_or_path or "a model that is not named (give --base)"
        print(f"{kind_of(config).card(config).shape} for {base_name}")
        print(f"Saved to {arguments.output}; load them with model.load_adapter({str(arguments.output)!r})")
        return 0
    if arguments.to not in formats():
        raise ConfigurationError(f"--to {arguments.to}: known formats are {', '.join([_PEFT, *formats()])}.")
    settings = _settings_of(arguments.source)
    base = _base_of(settings, arguments.base)
    model = load_model(base)
    load_adapter(model, arguments.source)
    print(export(find_heads(model), arguments.to, arguments.output, base))
    return 0


def _card(arguments: argparse.Namespace) -> int:
    from ..heads import kind_of
    from ..heads.card import measured_by

    columns = arguments.columns or [path.stem for path in arguments.bench]
    if len(columns) != len(arguments.bench):
        raise ConfigurationError(f"{len(columns)} --columns for {len(arguments.bench)} reports.")
    settings = _settings_of(str(arguments.adapter))
    try:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.bench]
        measured = measured_by(reports, columns, kind_of(settings).mode)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"That is no report of `bench --json` on these heads: {error!r}") from error
    _note(arguments.adapter, settings, arguments.repo, measured=measured)
    return 0


# ---------------------------------------------------------------- adapters in folders


def _note(adapter: Path, settings: HeadConfig, repo: str | None, **found: Any) -> None:
    """Put findings into an adapter's provenance, and make its card anew unless somebody wrote it."""
    from ..heads.card import save_card

    settings.provenance = {**(settings.provenance or {}), **found}
    settings.save_pretrained(str(adapter))
    path = adapter / "README.md"
    if save_card(settings, path, repo):
        print(f"Saved to {path}")
    else:
        print(f"Saved to {adapter / 'adapter_config.json'}; {path} was not made by hf-specdec and stays as it is.")


def _base_of(settings: HeadConfig, given: str | None) -> str:
    base = given or settings.base_model_name_or_path
    if not base:
        raise ConfigurationError("The adapter names no base model; pass --base.")
    return base


def _settings_of(adapter: str) -> HeadConfig:
    from peft import PeftConfig

    from ..heads import HeadConfig

    try:
        settings = PeftConfig.from_pretrained(adapter)
    except SpeculationError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot load the adapter {adapter!r}: {error}") from error
    if not isinstance(settings, HeadConfig):
        raise AdapterError(f"{adapter} is an adapter of type {settings.peft_type}, not of draft heads.")
    return settings
