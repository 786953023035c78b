"""Training draft heads: self-distillation with transformers' `Trainer` (which brings accelerate and several GPUs)."""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..errors import ConfigurationError, TrainingDataError
from ..heads.config import MedusaConfig
from ..heads.model import find_exit, find_heads
from ..heads.module import SharedOutput
from .answers import AnswerCache, prompts_digest, weights_digest, write_whole
from .data import Answers, DataSettings
from .exit import ExitInTraining, Texts, states_at_exit
from .losses import accuracy
from .medusa import HeadsInTraining, Positions
from .prompts import encode, read_prompts
from .settings import PROVENANCE, TOP_K, TrainingReport, TrainingSettings


def frequent_tokens(answers: Answers, size: int, vocab_size: int) -> torch.Tensor:
    """`[size]`: the tokens that the base model is likeliest to say, ascending (FR-Spec, arXiv:2502.14856).

    Counted by probability, so that tokens that were likely but not chosen count too; ties go to lower ids.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    counts.index_add_(0, answers.label_tokens.flatten().long(), answers.label_probabilities.flatten().double())
    counts.index_add_(0, answers.tokens.long(), torch.ones(len(answers.tokens), dtype=torch.float64))
    return (-counts).argsort(stable=True)[:size].sort().values


# ---------------------------------------------------------------- the whole way


def train_heads(
    model: Any,
    tokenizer: Any,
    data: Sequence[str | Path],
    output: str | Path,
    config: MedusaConfig | None = None,
    data_settings: DataSettings | None = None,
    settings: TrainingSettings | None = None,
    cache: str | Path | None = None,
    base_name: str | None = None,
    command: str | None = None,
    note: str | None = None,
    progress: bool = True,
    report_to: str = "none",
) -> TrainingReport:
    """Train draft heads for a model on answers of its own, and save them as a PEFT adapter.

    Under `accelerate launch` the processes share both the answering and the training. A run that was interrupted goes
    on where it stopped when it is started again with the same arguments.

    Main arguments:
        model: the base model; it is not changed.
        tokenizer: its tokenizer.
        data: prompts: JSON Lines files, `datasets` folders or ids (`prompts.read_prompts`).
        output: folder for the adapter, `training.json` and checkpoints.
        config: the heads that are trained.

    Other arguments:
        data_settings: how answers are made.
        settings: how heads are trained.
        cache: folder for the answers; None puts them into `output`.
        base_name: name of the base model to note in the adapter; None takes the one it was loaded by.
        command: the command line that is noted down.
        note: what else is noted down, for the model card.
        progress: whether to show progress bars.
        report_to: where `Trainer` logs to besides its own log.

    Returns:
        what came of it, also saved as `training.json`.

    Raises:
        TrainingDataError: the prompts cannot be read, or the cache holds answers made otherwise.
        ConfigurationError: the model has adapters.
        AdapterError: the model has no LM head that heads could be put beside, or the heads are not for it.
    """
    from accelerate import PartialState
    from transformers import Trainer, TrainingArguments, set_seed

    config, data_settings = copy.deepcopy(config) or MedusaConfig(), data_settings or DataSettings()
    settings, output = settings or TrainingSettings(), Path(output)
    if getattr(model, "peft_config", None):
        raise ConfigurationError(
            f"This {type(model).__name__} has adapters ({', '.join(map(repr, model.peft_config))}). Heads are trained "
            "on the model as it is loaded: load it anew, or unload() or merge them."
        )
    state = PartialState()
    with _heads_beside(model, copy.deepcopy(config)):  # what cannot be trained says so before hours of answering
        find_exit(model) if config.head_type == "exit" else find_heads(model)
    with _evaluating(model):
        chats = [chat for source in data for chat in read_prompts(source)]
        prompts = encode(tokenizer, chats, data_settings.max_prompt_tokens)
        if not prompts:
            raise TrainingDataError(f"All prompts are longer than {data_settings.max_prompt_tokens} tokens.")
        folder = Path(cache or output / "answers")
        answers = make_answers(model, tokenizer, prompts, folder, data_settings, settings, progress)
        parts = answers.split(settings.eval_part)
        if not all(len(part.tokens) for part in parts):
            raise TrainingDataError(
                "There are too few answers to hold some out; pass more prompts, or another eval_part."
            )
        claim = _claim_of(model, config, data_settings, settings, answers)
        set_seed(settings.seed)
        with _heads_beside(model, config) as peft_model:
            if base_name is not None:
                config.base_model_name_or_path = base_name
            began = time.perf_counter()
            learner, datasets, batch_size, weights = _task(model, config, parts, settings, folder, progress)
            with state.main_process_first():
                _make_claim(output / "checkpoints", claim)
            arguments = TrainingArguments(
                output_dir=str(output / "checkpoints"),
                per_device_train_batch_size=batch_size,
                per_device_eval_batch_size=batch_size,
                num_train_epochs=settings.epochs,
                learning_rate=settings.learning_rate,
                weight_decay=settings.weight_decay,
                lr_scheduler_type="cosine",
                warmup_steps=0.05,
                # gradients are always above the usual 1.0 here: clipped, the later heads learned markedly less
                max_grad_norm=0.0,
                bf16=settings.bf16,
                use_cpu=model.device.type == "cpu",
                seed=settings.seed,
                save_strategy="epoch",
                save_total_limit=1,
                eval_strategy="epoch",
                logging_steps=50,
                report_to=report_to,
                disable_tqdm=not progress,
                remove_unused_columns=False,
                dataloader_pin_memory=False,
                label_names=["target"],
            )
            trainer = Trainer(
                model=learner,
                args=arguments,
                train_dataset=datasets[0],
                eval_dataset=datasets[1],
                data_collator=_as_it_is,
                compute_metrics=_metrics,
            )
            checkpoint = _checkpoint(output / "checkpoints")
            trainer.train(resume_from_checkpoint=checkpoint)
            training_seconds = time.perf_counter() - began
            found = trainer.evaluate()
            report = TrainingReport(
                base=config.base_model_name_or_path or type(model).__name__,
                kind=config.head_type,
                data=[Path(source).name if Path(source).exists() else str(source) for source in data],
                positions=len(parts[0].tokens),
                held_out_positions=len(parts[1].tokens),
                heads=[
                    {name: round(found[f"eval_head{head}_{name}"], 4) for name in ("loss", *(f"top{k}" for k in TOP_K))}
                    for head in range(1 if config.head_type == "exit" else config.num_heads)
                ],
                data_seconds=round(answers.seconds / state.num_processes, 1),
                training_seconds=round(training_seconds, 1),
                resumed=checkpoint is not None,
                data_settings=asdict(data_settings),
                training_settings=asdict(settings),
                versions=_versions(),
                machine=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
                command=command,
                note=note,
            )
            if state.is_main_process:
                config.provenance = asdict(report)
                weights.to(getattr(torch, settings.dtype))
                peft_model.save_pretrained(str(output), save_embedding_layers=False)
                (output / PROVENANCE).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
            state.wait_for_everyone()
            return report


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode; afterwards it is in its own again."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _task(
    model: Any,
    config: MedusaConfig,
    parts: tuple[Answers, Answers],
    settings: TrainingSettings,
    folder: Path,
    progress: bool,
) -> tuple[nn.Module, list[Dataset], int, nn.Module]:
    """What is trained, on what (training, held out), so many items a step, and the weights that are saved."""
    if config.head_type != "exit":
        heads = find_heads(model)
        longest = min(int(part.lengths.max()) for part in parts)
        if longest <= heads.num_heads:
            raise TrainingDataError(
                f"The longest answer has {longest} tokens, too few for {heads.num_heads} heads to learn from. Make "
                "longer answers, or fewer heads."
            )
        output_of = _outputs(heads, parts[0])
        positions: list[Dataset] = [Positions(part, heads.num_heads, output_of) for part in parts]
        return HeadsInTraining(heads, settings), positions, settings.batch_size, heads.heads
    exit_ = find_exit(model)
    output_of = _outputs(exit_, parts[0])
    texts: list[Dataset] = [
        Texts(part, states_at_exit(model, part, exit_.exit_layer, folder / name, progress), output_of)
        for part, name in zip(
            parts, (f"exit{exit_.exit_layer}-{side}.safetensors" for side in ("training", "held_out")), strict=True
        )
    ]
    mean = len(parts[0].tokens) / max(1, len(parts[0].lengths))
    return ExitInTraining(exit_, settings), texts, max(1, round(settings.batch_size / mean)), exit_.weights


@contextmanager
def _heads_beside(model: Any, config: MedusaConfig) -> Iterator[Any]:
    """The model with new heads, as a `PeftModel`; afterwards it is without them."""
    from peft import get_peft_model

    peft_model = get_peft_model(model, config)
    try:
        yield peft_model
    finally:
        peft_model.unload()


def _claim_of(
    model: Any, config: MedusaConfig, data_settings: DataSettings, settings: TrainingSettings, answers: Answers
) -> str:
    """What makes a training the same one."""
    of = {
        "model": weights_digest(model),
        "heads": config.to_dict(),
        "data": asdict(data_settings),
        "training": asdict(settings),
        "prompts": prompts_digest(answers.prompts),
        "answers": hashlib.sha256(answers.tokens.numpy().tobytes()).hexdigest(),
    }
    return json.dumps(of, indent=2, default=str)


def _make_claim(folder: Path, mine: str) -> None:
    """Make sure that checkpoints in a folder are of this very training."""
    path = folder / "settings.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, mine)
    elif path.read_text(encoding="utf-8") != mine:
        raise TrainingDataError(
            f"{folder} holds checkpoints of another training: of another model, with other settings or other prompts. "
            "Use another output folder, or remove it."
        )


def make_answers(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    folder: Path,
    data_settings: DataSettings,
    settings: TrainingSettings,
    progress: bool = True,
) -> Answers:
    """The model's answers to the prompts, from the cache as far as they are there. See `AnswerCache.read`."""
    from accelerate import PartialState
    from tqdm.auto import tqdm

    state = PartialState()
    if state.is_main_process:
        AnswerCache(folder, model, tokenizer, prompts, data_settings)  # writes the manifest once
    state.wait_for_everyone()
    cache = AnswerCache(folder, model, tokenizer, prompts, data_settings)
    quiet, share = not progress or not state.is_main_process, slice(state.process_index, None, state.num_processes)
    for batch in tqdm(range(len(cache.batches_to_ask()))[share], desc="own prompts", unit="batch", disable=quiet):
        cache.ask(batch)
    state.wait_for_everyone()
    mine = cache.shards()[share]
    tokens, most = 0, settings.max_positions
    with tqdm(total=len(mine), desc="answers", unit="batch", disable=quiet) as bar:
        for shard in mine:
            if most is not None and tokens * state.num_processes >= most:
                break
            tokens += cache.make(shard)
            bar.update()
            bar.set_postfix(tokens=tokens)
    state.wait_for_everyone()
    return cache.read(most)


def _outputs(head: SharedOutput, answers: Answers) -> torch.Tensor:
    """Choose the tokens that can be drafted. `[V]`: the output that stands for each token, -1 where none does."""
    if head.token_map is not None:
        head.draft_from(frequent_tokens(answers, len(head.token_map), head.vocab_size))
    return head.outputs()


def _as_it_is(batch: Any) -> Any:
    """The data set has made a whole batch already."""
    return batch


def _metrics(prediction: Any) -> dict[str, float]:
    losses, ranks = (torch.as_tensor(part) for part in prediction.predictions)
    return {
        f"head{head}_{name}": value for head, one in enumerate(accuracy(ranks, losses)) for name, value in one.items()
    }


def _checkpoint(folder: Path) -> str | None:
    """The latest whole checkpoint in a folder. `Trainer` writes its state last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "peft", "accelerate", "hf-specdec")}
