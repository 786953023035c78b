"""The command line's part about draft heads: `hf-specdec train-heads`, `evaluate-heads`, `convert` and `card`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError, ConfigurationError, SpeculationError

if TYPE_CHECKING:
    from ..heads import MedusaConfig
    from ..training import Evaluation, ExitEvaluation


def add_commands(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the commands to a parser's subparsers."""
    _add_train(commands, formatter)
    _add_evaluate(commands, formatter)
    _add_convert(commands, formatter)
    _add_card(commands, formatter)


def _add_train(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    train = commands.add_parser(
        "train-heads",
        help="train draft heads for a model on answers of its own",
        description="Let a model answer prompts, and train heads that foresee what it will say (self-distillation). "
        "Answers are kept on disk and training is saved after every epoch: the same command goes on after an "
        "interruption. `accelerate launch -m hf_specdec train-heads ...` shares the work between devices.",
        formatter_class=formatter,
    )
    train.add_argument("--base", required=True, metavar="MODEL", help="base model: a local folder or a Hub id")
    train.add_argument("--base-name", metavar="ID", help="name of the base model to note in the adapter")
    train.add_argument("--note", metavar="TEXT", help="what else the model card should say of the training")
    train.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="DATA",
        help='prompts: JSON Lines files with "messages", "conversations", "prompt", "turns", "question", "instruction" '
        'or "text", or data sets (a folder, or an id on the Hub)',
    )
    train.add_argument("--output", required=True, type=Path, metavar="DIR", help="where to save the adapter")
    train.add_argument("--cache", type=Path, metavar="DIR", help="where to keep the answers (default: in the output)")
    train.add_argument(
        "--kind",
        choices=["independent", "sequential", "exit"],
        default="sequential",
        help="Medusa's heads, Hydra's, or an exit for mode early_exit (Kangaroo)",
    )
    train.add_argument("--exit-layer", type=int, metavar="E", help="with --kind exit: the layers below the exit")
    train.add_argument("--num-heads", type=int, metavar="N", default=4, help="heads: most tokens a draft is deep")
    train.add_argument(
        "--tied-heads", action="store_true", help="with --kind sequential: one head for all places (ReDrafter)"
    )
    train.add_argument("--num-layers", type=int, metavar="N", default=1, help="residual blocks of a head")
    train.add_argument(
        "--draft-vocab-size", type=int, metavar="N", default=8192, help="tokens that can be drafted; 0 for all"
    )
    train.add_argument(
        "--output-rank",
        type=int,
        metavar="R",
        help="rank of an output layer that the heads share (default: a sixth of the hidden size); 0 shares the "
        "model's LM head, which takes longer to read",
    )
    train.add_argument("--own-lm-head", action="store_true", help="give every head an LM head of its own")

    answers = train.add_argument_group("answers")
    answers.add_argument(
        "--own-prompts", type=int, metavar="N", default=0, help="prompts that the model makes up itself, besides these"
    )
    answers.add_argument("--answers-per-prompt", type=int, metavar="N", default=2, help="one greedy, the rest sampled")
    answers.add_argument("--max-new-tokens", type=int, metavar="N", default=256, help="most tokens of an answer")
    answers.add_argument("--max-prompt-tokens", type=int, metavar="N", default=1024, help="leave out longer prompts")
    answers.add_argument("--temperature", type=float, metavar="T", default=0.8, help="of the sampled answers")
    answers.add_argument("--answer-batch-size", type=int, metavar="N", default=32, help="prompts answered at once")
    answers.add_argument(
        "--max-positions", type=int, metavar="N", help="stop answering after so many tokens; given prompts come first"
    )

    training = train.add_argument_group("training")
    training.add_argument("--epochs", type=float, metavar="N", default=3.0, help="times every position is seen")
    training.add_argument("--batch-size", type=int, metavar="N", default=256, help="positions a step")
    training.add_argument("--learning-rate", type=float, metavar="X", default=3e-3, help="highest learning rate")
    training.add_argument("--eval-part", type=float, metavar="P", default=0.05, help="part of the prompts held out")
    training.add_argument("--bf16", action="store_true", help="train in mixed precision")
    training.add_argument("--seed", type=int, metavar="N", default=0, help="seed of answers and training")
    training.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="type of the saved weights"
    )
    training.add_argument("--device", metavar="DEVICE", help="where to run (default: cuda if there is one, else cpu)")
    training.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    train.set_defaults(run=_train)


def _add_evaluate(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    evaluate = commands.add_parser(
        "evaluate-heads",
        help="count how far heads foresee a model's answers, and write it into their model card",
        description="Let the base model answer prompts greedily, once, and count along its answers how often each head "
        "is right and how many tokens a forward brings with trees of several sizes, or how often an exit is right, "
        "trained and untrained. Speed is measured by `bench`.",
        formatter_class=formatter,
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


def _add_convert(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    convert = commands.add_parser(
        "convert",
        help="turn other projects' heads into an adapter, or an adapter into what vLLM serves",
        description="Read Medusa heads (v1, v2, Medusa-2, vLLM) and write them as a PEFT adapter; or, with --to vllm, "
        "read an adapter and write what vLLM loads, and print the command that serves it.",
        formatter_class=formatter,
    )
    convert.add_argument("source", metavar="SOURCE", help="a folder or a Hub id")
    convert.add_argument("output", type=Path, metavar="OUTPUT", help="folder to write")
    convert.add_argument("--to", choices=["peft", "vllm"], default="peft", help="what to write")
    convert.add_argument("--base", metavar="MODEL", help="the base model (default: the one that the source names)")
    convert.set_defaults(run=_convert)


def _add_card(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    card = commands.add_parser(
        "card",
        help="write what heads were measured to bring into their model card",
        description="Take the figures of `hf-specdec bench --adapter ... --json FILE`, one file for each column, into "
        "an adapter's provenance, and make its model card anew.",
        formatter_class=formatter,
    )
    card.add_argument("adapter", type=Path, metavar="ADAPTER", help="folder of the heads")
    card.add_argument("--bench", nargs="+", type=Path, required=True, metavar="FILE", help="reports of `bench --json`")
    card.add_argument(
        "--columns", nargs="+", metavar="NAME", help="what to call each report (default: its file's name)"
    )
    card.add_argument("--repo", metavar="NAME/HEADS", help="the repository that the card's example loads from")
    card.set_defaults(run=_card)


def _train(arguments: argparse.Namespace) -> int:
    import torch

    from ..heads import MedusaConfig
    from ..heads.module import lm_head_shape
    from ..measure.bench import load_model, load_tokenizer
    from ..training import DataSettings, TrainingSettings, train_heads

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    config = MedusaConfig(
        num_heads=arguments.num_heads,
        num_layers=arguments.num_layers,
        head_type=arguments.kind,
        exit_layer=arguments.exit_layer,
        tied_heads=arguments.tied_heads,
        draft_vocab_size=arguments.draft_vocab_size or None,
        own_lm_head=arguments.own_lm_head,
        output_rank=arguments.output_rank or None,
    )
    data_settings = DataSettings(
        own_prompts=arguments.own_prompts,
        answers_per_prompt=arguments.answers_per_prompt,
        max_new_tokens=arguments.max_new_tokens,
        max_prompt_tokens=arguments.max_prompt_tokens,
        temperature=arguments.temperature,
        batch_size=arguments.answer_batch_size,
        seed=arguments.seed,
    )
    settings = TrainingSettings(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        eval_part=arguments.eval_part,
        max_positions=arguments.max_positions,
        dtype=arguments.dtype,
        bf16=arguments.bf16,
        seed=arguments.seed,
    )
    device = arguments.device
    if device is None:
        from accelerate import PartialState

        device = str(PartialState().device)
    tokenizer = load_tokenizer(arguments.base)
    model = load_model(arguments.base, "float32" if device == "cpu" else "bfloat16", device)
    if arguments.output_rank is None and not arguments.own_lm_head:
        config.output_rank = max(1, lm_head_shape(model)[1] // 6)
    report = train_heads(
        model,
        tokenizer,
        arguments.data,
        arguments.output,
        config,
        data_settings,
        settings,
        cache=arguments.cache,
        base_name=arguments.base_name,
        note=arguments.note,
        command=f"hf-specdec {shlex.join(sys.argv[1:])}",
    )
    for number, head in enumerate(report.heads, start=1):
        name = "exit" if arguments.kind == "exit" else f"head {number}"
        print(f"{name}: top-1 {head['top1']:.3f}, top-10 {head['top10']:.3f}")
    print(f"on {report.held_out_positions} held-out positions")
    print(f"Saved to {arguments.output}")
    return 0


def _card(arguments: argparse.Namespace) -> int:
    from ..heads.card import measured_by

    columns = arguments.columns or [path.stem for path in arguments.bench]
    if len(columns) != len(arguments.bench):
        raise ConfigurationError(f"{len(columns)} --columns for {len(arguments.bench)} reports.")
    settings = _settings_of(str(arguments.adapter))
    try:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.bench]
        mode = "early_exit" if settings.head_type == "exit" else "medusa"
        measured = measured_by(reports, columns, mode)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"That is no report of `bench --json` on these heads: {error!r}") from error
    _note(arguments.adapter, settings, arguments.repo, measured=measured)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    import torch

    from ..heads.card import evaluation_tables
    from ..measure.bench import load_adapter, load_model, load_tokenizer
    from ..training.evaluate import NODES, evaluate_exit, evaluate_heads

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    settings = _settings_of(str(arguments.adapter))
    base = _base_of(settings, arguments.base)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(base, "float32" if device == "cpu" else "bfloat16", device)
    load_adapter(model, str(arguments.adapter))
    how = {
        "max_new_tokens": arguments.max_new_tokens,
        "per_task": arguments.per_task,
        "batch_size": arguments.batch_size,
    }
    found: Evaluation | ExitEvaluation
    if settings.head_type == "exit":
        if arguments.nodes is not None:
            raise ConfigurationError("--nodes is of trees, which an exit does not draft. Leave it out.")
        found = evaluate_exit(model, load_tokenizer(base), arguments.data, **how)
    else:
        found = evaluate_heads(model, load_tokenizer(base), arguments.data, nodes=arguments.nodes or NODES, **how)
    for number, head in enumerate(found.heads, start=1):
        name = "exit" if settings.head_type == "exit" else f"head {number}"
        print(f"{name}: top-1 {head['top1']:.3f}, top-10 {head['top10']:.3f}")
    for title, table in evaluation_tables(found.to_dict()):
        print(f"\n{title}:\n\n{table}")
    print()
    _note(arguments.adapter, settings, arguments.repo, evaluation=found.to_dict())
    return 0


def _note(adapter: Path, settings: MedusaConfig, repo: str | None, **found: Any) -> None:
    """Put findings into an adapter's provenance, and make its card anew unless somebody wrote it."""
    from ..heads.card import save_card

    settings.provenance = {**(settings.provenance or {}), **found}
    settings.save_pretrained(str(adapter))
    path = adapter / "README.md"
    if save_card(settings, path, repo):
        print(f"Saved to {path}")
    else:
        print(f"Saved to {adapter / 'adapter_config.json'}; {path} was not made by hf-specdec and stays as it is.")


def _base_of(settings: MedusaConfig, given: str | None) -> str:
    base = given or settings.base_model_name_or_path
    if not base:
        raise ConfigurationError("The adapter names no base model; pass --base.")
    return base


def _settings_of(adapter: str) -> MedusaConfig:
    from peft import PeftConfig

    from ..heads import MedusaConfig

    try:
        settings = PeftConfig.from_pretrained(adapter)
    except SpeculationError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot load the adapter {adapter!r}: {error}") from error
    if not isinstance(settings, MedusaConfig):
        raise AdapterError(f"{adapter} is an adapter of type {settings.peft_type}, not of Medusa heads.")
    return settings


def _convert(arguments: argparse.Namespace) -> int:
    from ..heads.formats import convert, export_vllm

    if arguments.to == "peft":
        config = convert(arguments.source, arguments.output, arguments.base)
        base_name = config.base_model_name_or_path or "a model that is not named (give --base)"
        print(f"{config.num_heads} heads of {config.num_layers} layers for {base_name}")
        print(f"Saved to {arguments.output}; load them with model.load_adapter({str(arguments.output)!r})")
        return 0
    from ..heads import find_heads
    from ..measure.bench import load_adapter, load_model

    settings = _settings_of(arguments.source)
    base = _base_of(settings, arguments.base)
    model = load_model(base)
    load_adapter(model, arguments.source)
    print(export_vllm(find_heads(model), arguments.output, base))
    return 0
