"""Training draft heads: self-distillation with transformers' `Trainer` (which brings accelerate and several GPUs)."""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, TrainingDataError
from ..heads.answers import Answers
from ..heads.config import HeadConfig
from ..heads.files import write_whole
from ..heads.finding import find_heads
from ..heads.kind import Task, kind_of
from ..heads.losses import TOP_K, accuracy
from .answers import make_answers, prompts_digest, weights_digest
from .data import DataSettings
from .prompts import encode, read_chats
from .settings import PROVENANCE, TrainingReport, TrainingSettings


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
    config: HeadConfig,
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
        data: prompts: JSON Lines files, `datasets` folders or ids (`prompts.read_chats`).
        output: folder for the adapter, `training.json` and checkpoints.
        config: the heads to train, of any registered kind.

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
    noted = {"command": command, "note": note}
    training = _Training(
        model, tokenizer, data_settings or DataSettings(), settings or TrainingSettings(), Path(output), progress, noted
    )
    return training.run(data, copy.deepcopy(config), Path(cache) if cache is not None else None, base_name, report_to)


@dataclass(frozen=True)
class _Training:
    """What stays the same all the way."""

    model: Any
    tokenizer: Any
    data_settings: DataSettings
    settings: TrainingSettings
    output: Path
    progress: bool
    # fields of the report that the caller knows
    noted: dict[str, Any]

    def run(
        self,
        data: Sequence[str | Path],
        config: HeadConfig,
        cache: Path | None,
        base_name: str | None,
        report_to: str,
    ) -> TrainingReport:
        """The whole way, from prompts to the adapter."""
        from accelerate import PartialState
        from transformers import set_seed

        self._check(config)
        state, folder = PartialState(), cache or self.output / "answers"
        with _evaluating(self.model):
            answers = self._answers(data, folder)
            parts = self._split(answers)
            claim = _claim_of(self.model, config, self.data_settings, self.settings, answers)
            set_seed(self.settings.seed)
            with _heads_beside(self.model, config) as peft_model:
                if base_name is not None:
                    config.base_model_name_or_path = base_name
                began = time.perf_counter()
                heads = find_heads(self.model)
                if heads.token_map is not None:
                    heads.draft_from(frequent_tokens(parts[0], len(heads.token_map), heads.vocab_size))
                task = kind_of(config).task(heads, parts, self.settings, folder, self.progress)
                with state.main_process_first():
                    _make_claim(self.output / "checkpoints", claim)
                checkpoint = _checkpoint(self.output / "checkpoints")
                trainer = self._trainer(task, report_to)
                trainer.train(resume_from_checkpoint=checkpoint)
                seconds = time.perf_counter() - began
                accuracies = _heads_in(trainer.evaluate())
                report = self._report(config, data, answers, parts, accuracies, seconds, checkpoint is not None)
                if state.is_main_process:
                    self._save(peft_model, config, heads.weights, report)
                state.wait_for_everyone()
                return report

    def _check(self, config: HeadConfig) -> None:
        """What cannot be trained says so before hours of answering."""
        if getattr(self.model, "peft_config", None):
            raise ConfigurationError(
                f"This {type(self.model).__name__} has adapters ({', '.join(map(repr, self.model.peft_config))}). "
                "Heads are trained on the model as it is loaded: load it anew, or unload() or merge them."
            )
        with _heads_beside(self.model, copy.deepcopy(config)):
            find_heads(self.model)

    def _answers(self, data: Sequence[str | Path], folder: Path) -> Answers:
        most = self.data_settings.max_prompt_tokens
        prompts = encode(self.tokenizer, [chat for source in data for chat in read_chats(source)], most)
        if not prompts:
            raise TrainingDataError(f"All prompts are longer than {most} tokens.")
        return make_answers(
            self.model,
            self.tokenizer,
            prompts,
            folder,
            self.data_settings,
            self.settings.max_positions,
            self.progress,
        )

    def _split(self, answers: Answers) -> tuple[Answers, Answers]:
        parts = answers.split(self.settings.eval_part)
        if not all(len(part.tokens) for part in parts):
            raise TrainingDataError(
                "There are too few answers to hold some out; pass more prompts, or another eval_part."
            )
        return parts

    def _trainer(self, task: Task, report_to: str) -> Any:
        from transformers import Trainer, TrainingArguments

        settings = self.settings
        arguments = TrainingArguments(
            output_dir=str(self.output / "checkpoints"),
            per_device_train_batch_size=task.batch_size,
            per_device_eval_batch_size=task.batch_size,
            num_train_epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            # gradients are always above the usual 1.0 here: clipped, the later heads learned markedly less
            max_grad_norm=0.0,
            bf16=settings.bf16,
            use_cpu=self.model.device.type == "cpu",
            seed=settings.seed,
            save_strategy="epoch",
            save_total_limit=1,
            eval_strategy="epoch",
            logging_steps=50,
            report_to=report_to,
            disable_tqdm=not self.progress,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            label_names=["target"],
        )
        return Trainer(
            model=task.learner,
            args=arguments,
            train_dataset=task.training,
            eval_dataset=task.held_out,
            data_collator=_as_it_is,
            compute_metrics=_metrics,
        )

    def _report(
        self,
        config: HeadConfig,
        data: Sequence[str | Path],
        answers: Answers,
        parts: tuple[Answers, Answers],
        heads: list[dict[str, float]],
        seconds: float,
        resumed: bool,
    ) -> TrainingReport:
        from accelerate import PartialState

        return TrainingReport(
            base=config.base_model_name_or_path or type(self.model).__name__,
            kind=kind_of(config).name,
            data=[Path(source).name if Path(source).exists() else str(source) for source in data],
            positions=len(parts[0].tokens),
            held_out_positions=len(parts[1].tokens),
            heads=heads,
            data_seconds=round(answers.seconds / PartialState().num_processes, 1),
            training_seconds=round(seconds, 1),
            resumed=resumed,
            data_settings=asdict(self.data_settings),
            training_settings=asdict(self.settings),
            versions=_versions(),
            machine=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            **self.noted,
        )

    def _save(self, peft_model: Any, config: HeadConfig, weights: torch.nn.Module, report: TrainingReport) -> None:
        config.provenance = asdict(report)
        weights.to(getattr(torch, self.settings.dtype))
        peft_model.save_pretrained(str(self.output), save_embedding_layers=False)
        text = json.dumps(asdict(report), indent=2) + "\n"
        (self.output / PROVENANCE).write_text(text, encoding="utf-8")


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode; afterwards it is in its own again."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _heads_beside(model: Any, config: HeadConfig) -> Iterator[Any]:
    """The model with new heads, as a `PeftModel`; afterwards it is without them."""
    from peft import get_peft_model

    peft_model = get_peft_model(model, config)
    try:
        yield peft_model
    finally:
        peft_model.unload()


def _claim_of(
    model: Any, config: HeadConfig, data_settings: DataSettings, settings: TrainingSettings, answers: Answers
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


def _as_it_is(batch: Any) -> Any:
    """The data set has made a whole batch already."""
    return batch


def _metrics(prediction: Any) -> dict[str, float]:
    losses, ranks = (torch.as_tensor(part) for part in prediction.predictions)
    return {
        f"head{number}_{name}": value
        for number, one in enumerate(accuracy(ranks, losses), start=1)
        for name, value in one.items()
    }


def _heads_in(found: dict[str, float]) -> list[dict[str, float]]:
    """Per head, from the first on: its accuracy on the held-out answers, as `Trainer` names it."""
    names = ("loss", *(f"top{k}" for k in TOP_K))
    heads: list[dict[str, float]] = []
    while f"eval_head{len(heads) + 1}_loss" in found:
        heads.append({name: round(found[f"eval_head{len(heads) + 1}_{name}"], 4) for name in names})
    return heads


def _checkpoint(folder: Path) -> str | None:
    """The latest whole checkpoint in a folder. `Trainer` writes its state last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "peft", "accelerate", "hf-specdec")}
