"""What an exit learns from: whole texts as hidden states of an early layer, and the model's own scores per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset

from ...target.halves import Halves, head_logits
from ..answers import Answers
from ..files import written_whole
from ..kind import Accuracy, LearningSettings, Task
from ..losses import accuracy, distillation_loss, feature_loss, rank_of
from .network import BoundExit

# tokens, padding included, that pass the lower layers at once
_TOKENS = 4096


@torch.no_grad()
def states_at_exit(model: Any, answers: Answers, exit_layer: int, file: Path, progress: bool) -> list[torch.Tensor]:
    """Hidden states `[P + T - 1, d]` at an exit, of every prompt and its answer but the last token. Kept in a file."""
    from tqdm.auto import tqdm

    texts = [
        [*prompt, *tokens[:-1]]
        for prompt, tokens in zip(
            answers.prompts, [part.tolist() for part in answers.tokens.split(answers.lengths.tolist())], strict=True
        )
    ]
    lengths = [len(text) for text in texts]
    if file.exists():
        hidden = load_file(file)["hidden"]
        if len(hidden) == sum(lengths):
            return list(hidden.split(lengths))
    halves, states = Halves(model, exit_layer), {}
    order = sorted(range(len(texts)), key=lambda index: lengths[index])
    with tqdm(total=sum(lengths), desc=f"states at layer {exit_layer}", unit="token", disable=not progress) as bar:
        while order:
            size = max(1, _TOKENS // max(1, lengths[order[-1]]))
            batch, order = order[-size:], order[:-size]
            longest = max(lengths[index] for index in batch)
            # what stands behind a text is seen by none of its tokens
            ids = torch.tensor([texts[index] + [0] * (longest - lengths[index]) for index in batch])
            with halves.taken() as taken:
                halves.below_headless(input_ids=ids.to(model.device), use_cache=False, **halves.quiet, return_dict=True)
            assert taken.hidden is not None
            for place, index in enumerate(batch):
                states[index] = taken.hidden[place, : lengths[index]].to(torch.bfloat16).cpu()
            bar.update(sum(lengths[index] for index in batch))
    found = [states[index] for index in range(len(texts))]
    with written_whole(file) as temporary:
        save_file({"hidden": torch.cat(found)}, temporary)
    return found


class Texts(Dataset):
    """Prompts with their answers; what is learned stands at the answers' tokens.

    Args:
        answers: what the base model said.
        states: per answer `[P + T - 1, d]`, the hidden states at the exit.
        output_of: `[V]`: the exit's output for each token, -1 where it cannot draft it.
    """

    def __init__(self, answers: Answers, states: list[torch.Tensor], output_of: torch.Tensor) -> None:
        self.answers, self.states, self.output_of = answers, states, output_of
        lengths = answers.lengths.long()
        self.starts = (lengths.cumsum(0) - lengths).tolist()
        self.index = [index for index, length in enumerate(lengths.tolist()) if length]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([item]).items()}

    def __getitems__(self, items: Sequence[int]) -> dict[str, torch.Tensor]:
        """A whole batch at once, padded on the right: L tokens of the longest text."""
        answers, chosen = self.answers, [self.index[item] for item in items]
        rows, longest = len(chosen), max(len(self.states[index]) for index in chosen)
        labels = answers.label_tokens.shape[1]
        batch = {
            "hidden": torch.zeros(rows, longest, self.states[0].shape[1]),
            "mask": torch.zeros(rows, longest, dtype=torch.bool),
            "exists": torch.zeros(rows, longest, dtype=torch.bool),
            "target": torch.full((rows, longest), -1),
            "label_outputs": torch.full((rows, longest, labels), -1),
            "label_probabilities": torch.zeros(rows, longest, labels),
            "features": torch.zeros(rows, longest, answers.hidden.shape[1]),
        }
        for row, index in enumerate(chosen):
            length, start, count = len(self.states[index]), self.starts[index], int(answers.lengths[index])
            # the token before an answer's first one is the prompt's last
            at, said = slice(length - count, length), slice(start, start + count)
            batch["hidden"][row, :length] = self.states[index].float()
            batch["mask"][row, :length] = True
            batch["exists"][row, at] = True
            batch["target"][row, at] = self.output_of[answers.tokens[said].long()]
            batch["label_outputs"][row, at] = self.output_of[answers.label_tokens[said].long()]
            batch["label_probabilities"][row, at] = answers.label_probabilities[said].float()
            batch["features"][row, at] = answers.hidden[said].float()
        return batch


class ExitInTraining(nn.Module):
    """What `Trainer` sees: the exit, and a loss. The base model is no part of it.

    Args:
        exit_: the exit.
        feature_weight: weight of the distance between the exit's state and the hidden state it stands for.
    """

    def __init__(self, exit_: BoundExit, feature_weight: float) -> None:
        super().__init__()
        self.exit = exit_.weights
        self._bound, self._feature_weight = exit_, feature_weight

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        exists: torch.Tensor,
        target: torch.Tensor,
        label_outputs: torch.Tensor,
        label_probabilities: torch.Tensor,
        features: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Loss, and `[B * L, 1]` its parts and the rank of the token that came (-1: there is none)."""
        state = self._bound.states(hidden, mask)[exists]
        logits = self._bound.shared_logits(state)
        losses = distillation_loss(logits, label_outputs[exists], label_probabilities[exists])
        shape = feature_loss(state, features[exists])
        ranks = rank_of(logits.detach(), target[exists], torch.ones_like(losses, dtype=torch.bool))
        where = exists.flatten()
        return {
            "loss": (losses + self._feature_weight * shape).mean(),
            "losses": _spread(losses.detach(), where, 0.0),
            "ranks": _spread(ranks, where, -1),
        }


def _spread(values: torch.Tensor, where: torch.Tensor, otherwise: float) -> torch.Tensor:
    spread = values.new_full((len(where), 1), otherwise)
    spread[where, 0] = values
    return spread


# ---------------------------------------------------------------- what a kind of heads says


def task_of(
    exit_: BoundExit, parts: Sequence[Answers], settings: LearningSettings, folder: Path, progress: bool
) -> Task:
    """What an exit learns from these answers (training, held out). See `HeadKind.task`."""
    training, held_out = (
        Texts(
            part,
            states_at_exit(
                exit_.model, part, exit_.exit_layer, folder / f"exit{exit_.exit_layer}-{side}.safetensors", progress
            ),
            exit_.outputs(),
        )
        for part, side in zip(parts, ("training", "held_out"), strict=True)
    )
    mean = len(parts[0].tokens) / max(1, len(parts[0].lengths))
    learner = ExitInTraining(exit_, settings.feature_weight)
    return Task(learner, training, held_out, max(1, round(settings.batch_size / mean)))


def accuracy_along(exit_: BoundExit, answers: Answers, progress: bool) -> Accuracy:
    """How often the exit predicts the next token of these answers, and how often its layer does untrained."""
    untrained, ranks, losses = zip(*_exit_along(exit_, answers, progress), strict=True)
    hits = [untrained, [(rank == 0)[:, 0] for rank in ranks]]
    return Accuracy(
        heads=accuracy(torch.cat(ranks), torch.cat(losses)),
        counts={"first_token": [[(int(hit.sum()), len(hit)) for hit in found] for found in hits]},
    )


@torch.no_grad()
def _exit_along(
    exit_: BoundExit, answers: Answers, progress: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of every answer of T tokens: where its exit would be right untrained `[T]`; ranks and losses `[T, 1]`."""
    from tqdm.auto import tqdm

    model, output_of, lengths = exit_.model, exit_.outputs(), answers.lengths.tolist()
    device, halves = model.device, Halves(model, exit_.exit_layer)
    parts = (answers.tokens.long(), answers.label_tokens.long(), answers.label_probabilities)
    rows = list(zip(answers.prompts, *(part.split(lengths) for part in parts), strict=True))
    for prompt, tokens, labels, probabilities in tqdm(rows, desc="texts", disable=not progress):
        if not len(tokens):
            yield torch.zeros(0, dtype=torch.bool), torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1)
            continue
        ids, said = torch.tensor([[*prompt, *tokens[:-1].tolist()]], device=device), slice(-len(tokens), None)
        with halves.taken() as taken:
            halves.below_headless(input_ids=ids, use_cache=False, **halves.quiet, return_dict=True)
        assert taken.hidden is not None
        untrained = head_logits(model, taken.hidden[:, said])[0].argmax(-1).cpu()
        states = exit_.states(taken.hidden, torch.ones_like(ids, dtype=torch.bool))[0, said]
        logits = exit_.shared_logits(states).cpu()
        ranks = rank_of(logits, output_of[tokens], torch.ones(len(tokens), dtype=torch.bool))
        losses = distillation_loss(logits, output_of[labels], probabilities)
        yield untrained == tokens, ranks[:, None], losses[:, None]
