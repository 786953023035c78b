"""Training draft heads: self-distillation with transformers' `Trainer` (which brings accelerate and several GPUs)."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..errors import ConfigurationError, TrainingDataError
from ..heads.config import MedusaConfig
from ..heads.model import find_heads
from ..heads.module import BoundHeads
from .data import AnswerCache, DataSettings, encode, read_prompts
from .losses import distillation_loss, feature_loss, head_weights

# held-out accuracy is reported for these many guesses
TOP_K = (1, 10)
PROVENANCE = "training.json"


@dataclass(frozen=True)
class TrainingSettings:
    """How heads are trained. Batches are counted in positions.

    Args:
        epochs: times that every position is seen.
        batch_size: positions a step.
        learning_rate: highest, after a warm-up of 5 % of the steps; falls to zero along a cosine.
        weight_decay: of AdamW.
        head_decay: the loss of head k counts `head_decay**k`.
        feature_weight: weight of the distance between a head's state and the hidden state it stands for.
        eval_part: part of the prompts that is held out.
        max_positions: most positions of answers made; None makes all.
        dtype: of the saved weights.
        bf16: whether to train in mixed precision.
        seed: of the order of the positions.
    """

    epochs: float = 3.0
    batch_size: int = 1024
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    head_decay: float = 0.8
    feature_weight: float = 0.1
    eval_part: float = 0.05
    max_positions: int | None = None
    dtype: str = "bfloat16"
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "head_decay"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0, got {getattr(self, name)}.")
        if not 0 < self.eval_part < 1:
            raise ConfigurationError(f"eval_part must lie between 0 and 1, got {self.eval_part}.")


@dataclass
class TrainingReport:
    """What came of a training; written beside the weights as `training.json`."""

    base: str
    kind: str
    data: list[str]
    positions: int
    held_out_positions: int
    # of every head, on the held-out prompts: {"loss": ..., "top1": ..., "top10": ...}
    heads: list[dict[str, float]]
    data_seconds: float
    training_seconds: float
    data_settings: dict[str, Any]
    training_settings: dict[str, Any]
    versions: dict[str, str]
    machine: str
    command: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- positions


class Positions(Dataset):
    """Every position of the answers that has at least one token to predict.

    Position t of an answer has the hidden state that gave token t; head k predicts token t + 1 + k from it.

    Args:
        answers: what `AnswerCache.read` returns, or a part of it.
        num_heads: H.
        output_of: `[V]`: the heads' output for each token, -1 where they cannot draft it.
    """

    def __init__(self, answers: dict[str, torch.Tensor], num_heads: int, output_of: torch.Tensor) -> None:
        self.answers, self.num_heads, self.output_of = answers, num_heads, output_of
        lengths = answers["lengths"].long()
        ends = lengths.cumsum(0).repeat_interleave(lengths)
        # [N]: tokens of the same answer after each position
        self.ahead = ends - torch.arange(len(ends)) - 1
        self.index = self.ahead.nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([item]).items()}

    def __getitems__(self, items: Sequence[int]) -> dict[str, torch.Tensor]:
        """A whole batch at once: the loader's collator has nothing left to do."""
        at = self.index[torch.as_tensor(items)]
        steps = torch.arange(self.num_heads)
        ahead = at[:, None] + 1 + steps  # [n, H]
        exists = steps < self.ahead[at][:, None]
        ahead = torch.where(exists, ahead, at[:, None])
        tokens = self.answers["tokens"].long()
        return {
            "hidden": self.answers["hidden"][at].float(),
            # [n, H]: the token that each head's predecessor stands on (head 0: the last committed one)
            "before": tokens[ahead - exists.long()],
            "target": self.output_of[tokens[ahead]],
            "label_outputs": self.output_of[self.answers["label_tokens"][ahead].long()],
            "label_probabilities": self.answers["label_probabilities"][ahead].float(),
            "features": self.answers["hidden"][ahead].float(),
            "exists": exists,
        }


def split(answers: dict[str, torch.Tensor], part: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(training, held-out) answers; all answers to a prompt fall on the same side, in every run."""
    held_out = answers["prompts"] % 10_000 < round(part * 10_000)
    return _pick(answers, ~held_out), _pick(answers, held_out)


def _pick(answers: dict[str, torch.Tensor], which: torch.Tensor) -> dict[str, torch.Tensor]:
    positions = which.repeat_interleave(answers["lengths"].long())
    return {
        name: tensor[which if len(tensor) == len(which) and name in ("lengths", "prompts") else positions]
        for name, tensor in answers.items()
    }


def frequent_tokens(answers: dict[str, torch.Tensor], size: int, vocab_size: int) -> torch.Tensor:
    """`[size]`: the tokens that the base model is likeliest to say, ascending (FR-Spec, arXiv:2502.14856).

    Counted by probability, so that tokens that were likely but not chosen count too; ties go to lower ids.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    counts.index_add_(0, answers["label_tokens"].flatten().long(), answers["label_probabilities"].flatten().double())
    counts.index_add_(0, answers["tokens"].long(), torch.ones(len(answers["tokens"]), dtype=torch.float64))
    return (-counts).argsort(stable=True)[:size].sort().values


# ---------------------------------------------------------------- the model that is trained


class HeadsInTraining(nn.Module):
    """What `Trainer` sees: the heads, and a loss. The base model is no part of it."""

    def __init__(self, heads: BoundHeads, settings: TrainingSettings) -> None:
        super().__init__()
        self.heads = heads.heads
        self._bound, self._settings = heads, settings
        self._weights: torch.Tensor
        self.register_buffer("_weights", head_weights(heads.num_heads, settings.head_decay), persistent=False)

    def forward(
        self,
        hidden: torch.Tensor,
        before: torch.Tensor,
        target: torch.Tensor,
        label_outputs: torch.Tensor,
        label_probabilities: torch.Tensor,
        features: torch.Tensor,
        exists: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Loss, and for every head `[n, H]`: its own loss and the rank of the token that came (-1: there is none)."""
        bound, count = self._bound, self._bound.num_heads
        states = states_along(bound, hidden, before)
        losses, ranks, total = [], [], hidden.new_zeros(())
        for head in range(count):
            logits = bound.logits(head, states[head])
            loss = distillation_loss(logits, label_outputs[:, head], label_probabilities[:, head])
            shape = feature_loss(states[head], features[:, head])
            seen = exists[:, head]
            mixed = loss + self._settings.feature_weight * shape
            total = total + self._weights[head] * (mixed * seen).sum() / seen.sum().clamp(min=1)
            losses.append(loss.detach())
            ranks.append(_rank(logits.detach(), target[:, head], seen))
        return {"loss": total, "losses": torch.stack(losses, 1), "ranks": torch.stack(ranks, 1)}


def states_along(heads: BoundHeads, hidden: torch.Tensor, before: torch.Tensor) -> list[torch.Tensor]:
    """The state `[n, d]` of every head, along the tokens `before [n, H]` that the text goes on with."""
    if not heads.is_sequential:
        return list(heads.all_states(hidden))
    states, state = [], heads.start(hidden)
    for head in range(heads.num_heads):
        state = heads.step(head, state, before[:, head])
        states.append(state)
    return states


def _rank(logits: torch.Tensor, target: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """`[n]`: how many outputs a head likes better than the token that came; many where it cannot draft it."""
    score = logits.gather(1, target.clamp(min=0)[:, None])
    rank = (logits > score).sum(1)
    rank = torch.where(target >= 0, rank, logits.shape[1])
    return torch.where(seen, rank, -1)


def accuracy(ranks: torch.Tensor, losses: torch.Tensor) -> list[dict[str, float]]:
    """Per head: loss and top-k accuracy over the positions where there is a token to predict. `[n, H]` each."""
    found = []
    for head in range(ranks.shape[1]):
        rank = ranks[:, head]
        seen = rank >= 0
        one = {"loss": float(losses[seen, head].mean())}
        one.update({f"top{k}": float((rank[seen] < k).float().mean()) for k in TOP_K})
        found.append(one)
    return found


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
    progress: bool = True,
    report_to: str = "none",
) -> TrainingReport:
    """Train draft heads for a model on answers of its own, and save them as a PEFT adapter.

    Under `accelerate launch` the processes share both the answering and the training. A run that was interrupted goes
    on where it stopped when it is started again with the same arguments.

    Main arguments:
        model: the base model; it is not changed.
        tokenizer: its tokenizer.
        data: prompts: JSON Lines files, `datasets` folders or ids (`data.read_prompts`).
        output: folder for the adapter, `training.json` and checkpoints.
        config: the heads that are trained.

    Other arguments:
        data_settings: how answers are made.
        settings: how heads are trained.
        cache: folder for the answers; None puts them into `output`.
        base_name: name of the base model to note in the adapter; None takes the one it was loaded by.
        command: the command line that is noted down.
        progress: whether to show progress bars.
        report_to: where `Trainer` logs to besides its own log.

    Returns:
        what came of it, also saved as `training.json`.

    Raises:
        TrainingDataError: the prompts cannot be read, or the cache holds answers made otherwise.
        AdapterError: the model has no LM head that heads could be put beside.
    """
    from accelerate import PartialState
    from transformers import Trainer, TrainingArguments, set_seed

    config, data_settings = config or MedusaConfig(), data_settings or DataSettings()
    settings, output = settings or TrainingSettings(), Path(output)
    state = PartialState()
    model.eval()
    began = time.perf_counter()
    chats = [chat for source in data for chat in read_prompts(source)]
    prompts = encode(tokenizer, chats, data_settings.max_prompt_tokens)
    if not prompts:
        raise TrainingDataError(f"All prompts are longer than {data_settings.max_prompt_tokens} tokens.")
    answers = make_answers(model, prompts, Path(cache or output / "answers"), data_settings, settings, progress)
    data_seconds = time.perf_counter() - began

    _claim(output / "checkpoints", config, data_settings, settings, len(prompts))
    set_seed(settings.seed)
    with _heads_beside(model, config) as peft_model:
        if base_name is not None:
            config.base_model_name_or_path = base_name
        heads = find_heads(model)
        training, held_out = split(answers, settings.eval_part)
        if not len(held_out["lengths"]) or not len(training["lengths"]):
            raise TrainingDataError("There are too few prompts to hold some out; pass more, or another eval_part.")
        if heads.token_map is not None:
            heads.draft_from(frequent_tokens(training, len(heads.token_map), heads.vocab_size))
        output_of = _output_of(heads)
        datasets = [Positions(part, heads.num_heads, output_of) for part in (training, held_out)]
        arguments = TrainingArguments(
            output_dir=str(output / "checkpoints"),
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            num_train_epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
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
            model=HeadsInTraining(heads, settings),
            args=arguments,
            train_dataset=datasets[0],
            eval_dataset=datasets[1],
            data_collator=_as_it_is,
            compute_metrics=_metrics,
        )
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint=_checkpoint(output / "checkpoints"))
        training_seconds = time.perf_counter() - began
        found = trainer.evaluate()
        report = TrainingReport(
            base=config.base_model_name_or_path or type(model).__name__,
            kind=config.head_type,
            data=[Path(source).name if Path(source).exists() else str(source) for source in data],
            positions=len(datasets[0]),
            held_out_positions=len(datasets[1]),
            heads=[
                {name: round(found[f"eval_head{head}_{name}"], 4) for name in ("loss", *(f"top{k}" for k in TOP_K))}
                for head in range(heads.num_heads)
            ],
            data_seconds=round(data_seconds, 1),
            training_seconds=round(training_seconds, 1),
            data_settings=asdict(data_settings),
            training_settings=asdict(settings),
            versions=_versions(),
            machine=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            command=command,
        )
        if state.is_main_process:
            config.provenance = asdict(report)
            heads.heads.to(getattr(torch, settings.dtype))
            peft_model.save_pretrained(str(output), save_embedding_layers=False)
            (output / PROVENANCE).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        state.wait_for_everyone()
        return report


@contextmanager
def _heads_beside(model: Any, config: MedusaConfig) -> Iterator[Any]:
    """The model with new heads, as a `PeftModel`; afterwards it is without them."""
    from peft import get_peft_model

    peft_model = get_peft_model(model, config)
    try:
        yield peft_model
    finally:
        peft_model.unload()


def _claim(
    folder: Path, config: MedusaConfig, data_settings: DataSettings, settings: TrainingSettings, prompts: int
) -> None:
    """Make sure that checkpoints in a folder are of this very training."""
    mine = json.dumps(
        {"heads": config.to_dict(), "data": asdict(data_settings), "training": asdict(settings), "prompts": prompts},
        indent=2,
        default=str,
    )
    path = folder / "settings.json"
    if path.exists() and path.read_text(encoding="utf-8") != mine:
        raise TrainingDataError(
            f"{folder} holds checkpoints of a training with other settings. Use another output folder, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(mine, encoding="utf-8")


def make_answers(
    model: Any,
    prompts: list[list[int]],
    folder: Path,
    data_settings: DataSettings,
    settings: TrainingSettings,
    progress: bool = True,
) -> dict[str, torch.Tensor]:
    """The model's answers to the prompts, from the cache as far as they are there. See `AnswerCache.read`."""
    from accelerate import PartialState
    from tqdm.auto import tqdm

    state = PartialState()
    if state.is_main_process:
        AnswerCache(folder, model, prompts, data_settings)  # writes the manifest once
    state.wait_for_everyone()
    cache = AnswerCache(folder, model, prompts, data_settings)
    mine = cache.shards[state.process_index :: state.num_processes]
    tokens, most = 0, settings.max_positions
    with tqdm(total=len(mine), desc="answers", unit="batch", disable=not progress or not state.is_main_process) as bar:
        for shard in mine:
            if most is not None and tokens * state.num_processes >= most:
                break
            tokens += cache.make(shard)
            bar.update()
            bar.set_postfix(tokens=tokens)
    state.wait_for_everyone()
    return cache.read(most)


def _output_of(heads: BoundHeads) -> torch.Tensor:
    """`[V]`: the output that stands for each token, -1 where none does."""
    if heads.token_map is None:
        return torch.arange(heads.vocab_size)
    outputs = torch.full((heads.vocab_size,), -1)
    outputs[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
    return outputs


def _as_it_is(batch: Any) -> Any:
    """The data set has made a whole batch already."""
    return batch


def _metrics(prediction: Any) -> dict[str, float]:
    losses, ranks = (torch.as_tensor(part) for part in prediction.predictions)
    return {
        f"head{head}_{name}": value for head, one in enumerate(accuracy(ranks, losses)) for name, value in one.items()
    }


def _checkpoint(folder: Path) -> str | None:
    """The latest whole checkpoint in a folder."""
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "peft", "accelerate", "hf-specdec")}
