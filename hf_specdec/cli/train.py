"""`hf-specdec train-heads`. Its options for heads are those of the registered kinds' settings."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .arguments import Help

_NAME = "train-heads"


def add_command(commands: Any, argv: Sequence[str]) -> None:
    """Add the command to a parser's subparsers; its options for heads where the command line `argv` calls it."""
    parser = commands.add_parser(
        _NAME,
        help="train draft heads for a model on answers of its own",
        description="Let a model answer prompts, and train heads that predict what it will say (self-distillation). "
        "Answers are kept on disk and training is saved after every epoch: the same command goes on after an "
        "interruption. `accelerate launch -m hf_specdec train-heads ...` shares the work between devices.",
        formatter_class=Help,
    )
    parser.add_argument("--base", required=True, metavar="MODEL", help="base model: a local folder or a Hub id")
    parser.add_argument("--base-name", metavar="ID", help="name of the base model to note in the adapter")
    parser.add_argument("--note", metavar="TEXT", help="what else the model card should say of the training")
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="DATA",
        help='prompts: JSON Lines files with "messages", "conversations", "prompt", "turns", "question", "instruction" '
        'or "text", or data sets (a folder, or an id on the Hub)',
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="where to save the adapter")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where to keep the answers (default: in the output)")
    if _NAME in argv:  # kinds are PEFT configs, and PEFT takes a while to import
        _add_heads(parser)
    _add_answers(parser.add_argument_group("answers"))
    _add_training(parser.add_argument_group("training"))
    parser.set_defaults(run=_train)


def _add_heads(parser: argparse.ArgumentParser) -> None:
    from ..heads import DEFAULT_KIND, head_kinds

    group = parser.add_argument_group("heads")
    group.add_argument(
        "--kind",
        choices=[kind.name for kind in head_kinds()],
        default=DEFAULT_KIND,
        help="; ".join(f"{kind.name}: {kind.called}, for mode {kind.mode}" for kind in head_kinds()),
    )
    group.add_argument(
        "--draft-vocab-size", type=int, metavar="N", default=8192, help="tokens that can be drafted; 0 for all"
    )
    group.add_argument(
        "--output-rank",
        type=int,
        metavar="R",
        help="rank of an output layer that the heads share (default: a sixth of the hidden size); 0 shares the "
        "model's LM head, which takes longer to read",
    )
    options = dict.fromkeys(name for kind in head_kinds() for name in _options(kind))
    for name in options:
        kinds = [kind for kind in head_kinds() if name in _options(kind)]
        setting, value_type = _options(kinds[0])[name]
        where = f"with --kind {' or '.join(kind.name for kind in kinds)}: " if len(kinds) < len(head_kinds()) else ""
        default = f" (default: {setting.default})" if setting.default not in (None, False, 0) else ""
        how: dict[str, Any] = {"action": "store_true"}
        if value_type is not bool:
            how = {"type": value_type, "metavar": setting.metadata["option"]}
        text = f"{where}{setting.metadata['help']}{default}"
        group.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, help=text, **how)


def _add_answers(group: Any) -> None:
    group.add_argument(
        "--own-prompts", type=int, metavar="N", default=0, help="prompts that the model makes up itself, besides these"
    )
    group.add_argument("--answers-per-prompt", type=int, metavar="N", default=2, help="one greedy, the rest sampled")
    group.add_argument("--max-new-tokens", type=int, metavar="N", default=256, help="most tokens of an answer")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", default=1024, help="leave out longer prompts")
    group.add_argument("--temperature", type=float, metavar="T", default=0.8, help="of the sampled answers")
    group.add_argument("--answer-batch-size", type=int, metavar="N", default=32, help="prompts answered at once")
    group.add_argument(
        "--max-positions", type=int, metavar="N", help="stop answering after so many tokens; given prompts come first"
    )


def _add_training(group: Any) -> None:
    group.add_argument("--epochs", type=float, metavar="N", default=3.0, help="times every position is seen")
    group.add_argument("--batch-size", type=int, metavar="N", default=256, help="positions per step")
    group.add_argument("--learning-rate", type=float, metavar="X", default=3e-3, help="highest learning rate")
    group.add_argument("--eval-part", type=float, metavar="P", default=0.05, help="part of the prompts held out")
    group.add_argument("--bf16", action="store_true", help="train in mixed precision")
    group.add_argument("--seed", type=int, metavar="N", default=0, help="seed of answers and training")
    group.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="type of the saved weights")
    group.add_argument("--device", metavar="DEVICE", help="where to run (default: cuda if there is one, else cpu)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")


# ---------------------------------------------------------------- options of a kind of heads


def _options(kind: Any) -> dict[str, tuple[dataclasses.Field, type]]:
    """Name -> (field, type of its value) of the settings of a kind that are options."""
    hints = typing.get_type_hints(kind.config)
    return {
        setting.name: (setting, _value_type(hints[setting.name]))
        for setting in dataclasses.fields(kind.config)
        if "option" in setting.metadata and setting.name not in kind.preset
    }


def _value_type(hint: Any) -> type:
    """The type of a setting's value: that of `T | None` is T."""
    return next(one for one in (typing.get_args(hint) or (hint,)) if one is not type(None))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(arguments: argparse.Namespace) -> Iterator[str]:
    """Names of the options of heads that the command line gives."""
    from ..heads import head_kinds

    return (name for name in dict.fromkeys(n for kind in head_kinds() for n in _options(kind)) if name in arguments)


def _config_of(arguments: argparse.Namespace) -> Any:
    """The heads that are asked for."""
    from ..heads import get_head_kind

    kind = get_head_kind(arguments.kind)
    given = list(_given(arguments))
    foreign = [_flag(name) for name in given if name not in _options(kind)]
    if foreign:
        raise ConfigurationError(f"{', '.join(foreign)}: heads of --kind {kind.name} have no such setting.")
    return kind.with_settings(
        draft_vocab_size=arguments.draft_vocab_size or None,
        output_rank=arguments.output_rank or None,
        **{name: getattr(arguments, name) for name in given},
    )


# ---------------------------------------------------------------- the command


def _train(arguments: argparse.Namespace) -> int:
    import torch

    from ..heads import get_head_kind
    from ..heads.output import lm_head_shape
    from ..measure.loading import load_model, load_tokenizer
    from ..training import train_heads

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    config = _config_of(arguments)
    data_settings, settings = _settings_of(arguments)
    device = arguments.device
    if device is None:
        from accelerate import PartialState

        device = str(PartialState().device)
    tokenizer = load_tokenizer(arguments.base)
    model = load_model(arguments.base, "float32" if device == "cpu" else "bfloat16", device)
    if arguments.output_rank is None and not config.has_own_outputs:
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
    kind = get_head_kind(arguments.kind)
    for number, head in enumerate(report.heads, start=1):
        print(f"{kind.head_name.format(number=number)}: top-1 {head['top1']:.3f}, top-10 {head['top10']:.3f}")
    print(f"on {report.held_out_positions} held-out positions")
    print(f"Saved to {arguments.output}")
    return 0


def _settings_of(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """How answers are made, and how heads are trained."""
    from ..training import DataSettings, TrainingSettings

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
    return data_settings, settings
