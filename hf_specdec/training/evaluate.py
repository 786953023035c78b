"""What heads foresee of texts that they were not trained on, without decoding again for every size of tree.

The base model answers the prompts once, greedily; accuracy and acceptance are then counted along its answers. Lossless
decoding commits these very tokens, so the acceptance is the one that `generate` would meet with trees of a fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..config import MedusaModeConfig
from ..draft import Budget, Context
from ..drafters.medusa import MedusaDrafter
from ..errors import ConfigurationError, TrainingDataError
from ..heads.exit import BoundExit
from ..heads.model import find_exit, find_heads
from ..heads.module import BoundHeads
from ..measure.bench import Prompt, read_prompts
from ..measure.report import OVERALL
from ..sampling import Selection
from ..target.halves import Halves, Handover, head_logits
from .data import Answers, DataSettings, answer, joined
from .losses import accuracy, distillation_loss, rank_of
from .medusa import HeadsInTraining, Positions
from .prompts import encode
from .settings import TrainingSettings

NODES = (2, 7, 15, 31, 63)
_POSITIONS = 1024


@dataclass(frozen=True)
class _Counted:
    data: str
    prompts: int
    positions: int
    max_new_tokens: int
    # of every head, or of the exit alone: {"loss": ..., "top1": ..., "top10": ...}
    heads: list[dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """As it is saved."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation(_Counted):
    """What was counted of heads; part of an adapter's provenance."""

    # drafted nodes of the trees that were tried
    nodes: list[int]
    # task -> mean acceptance length with each of them: tokens a forward of the base model
    acceptance: dict[str, list[float]]
    # the same where what the text said before shares the trees, as it does in mode `medusa`
    acceptance_with_lookup: dict[str, list[float]]


@dataclass(frozen=True)
class ExitEvaluation(_Counted):
    """What was counted of a trained exit; part of an adapter's provenance."""

    # task -> part of the tokens that the exit foresees, a draft's first one: [with the model's own norm and LM head,
    # trained]
    first_token: dict[str, list[float]]


def evaluate_heads(
    model: Any,
    tokenizer: Any,
    data: Path,
    adapter: str | None = None,
    nodes: Sequence[int] = NODES,
    max_new_tokens: int = 128,
    per_task: int | None = None,
    batch_size: int = 10,
    progress: bool = True,
) -> Evaluation:
    """Count how far heads foresee a model's greedy answers.

    Main arguments:
        model: the base model with the heads loaded.
        tokenizer: its tokenizer.
        data: JSON Lines of prompts, with their `task` perhaps (`bench.read_prompts`).

    Other arguments:
        adapter: name of the heads; None takes the active ones.
        nodes: sizes of trees to try, the root not counted.
        max_new_tokens: most tokens of an answer.
        per_task: most prompts of a task; None takes all.
        batch_size: prompts answered at once.
        progress: whether to show progress bars.

    Raises:
        AdapterError: the model has no such heads.
        ConfigurationError: the prompts cannot be read, or a setting is out of range.
        TrainingDataError: the answers are too short to count anything on.
    """
    if not nodes or min(nodes) < 1 or max_new_tokens < 3 or batch_size < 1:
        raise ConfigurationError("nodes and batch_size must be at least 1, and max_new_tokens at least 3.")
    heads = find_heads(model, adapter)
    prompts, answers = _asked(model, tokenizer, data, max_new_tokens, per_task, batch_size, progress)
    longest = int(answers.lengths.max())
    if longest <= heads.num_heads:
        raise TrainingDataError(
            f"The longest answer has {longest} tokens, too few for {heads.num_heads} heads to foresee. Make longer "
            "answers, or ask other prompts."
        )

    def acceptance(prompt_lookup: bool) -> dict[str, list[float]]:
        return _per_task(prompts, [acceptance_along(heads, answers, size, prompt_lookup) for size in nodes])

    return Evaluation(
        data=data.name,
        prompts=len(prompts),
        positions=len(answers.tokens),
        max_new_tokens=max_new_tokens,
        heads=accuracy_along(heads, answers),
        nodes=list(nodes),
        acceptance=acceptance(prompt_lookup=False),
        acceptance_with_lookup=acceptance(prompt_lookup=True),
    )


def evaluate_exit(
    model: Any,
    tokenizer: Any,
    data: Path,
    adapter: str | None = None,
    max_new_tokens: int = 128,
    per_task: int | None = None,
    batch_size: int = 10,
    progress: bool = True,
) -> ExitEvaluation:
    """Count how often a trained exit foresees a model's greedy answers, and how often its layer does untrained.

    Main arguments:
        model: the base model with the exit loaded.
        tokenizer: its tokenizer.
        data: JSON Lines of prompts, with their `task` perhaps (`bench.read_prompts`).

    Other arguments:
        adapter: name of the exit; None takes the active one.
        max_new_tokens: most tokens of an answer.
        per_task: most prompts of a task; None takes all.
        batch_size: prompts answered at once.
        progress: whether to show progress bars.

    Raises:
        AdapterError: the model has no trained exit.
        ConfigurationError: the prompts cannot be read, or a setting is out of range.
    """
    if max_new_tokens < 3 or batch_size < 1:
        raise ConfigurationError("batch_size must be at least 1, and max_new_tokens at least 3.")
    exit_ = find_exit(model, adapter)
    prompts, answers = _asked(model, tokenizer, data, max_new_tokens, per_task, batch_size, progress)
    untrained, ranks, losses = zip(*_exit_along(exit_, answers, progress), strict=True)
    hits = [
        [(int(hit.sum()), len(hit)) for hit in found] for found in (untrained, [(rank == 0)[:, 0] for rank in ranks])
    ]
    return ExitEvaluation(
        data=data.name,
        prompts=len(prompts),
        positions=len(answers.tokens),
        max_new_tokens=max_new_tokens,
        heads=_rounded(accuracy(torch.cat(ranks), torch.cat(losses))),
        first_token=_per_task(prompts, hits),
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
        untrained = head_logits(model, Handover(taken.hidden[:, said], taken.tuple_length))[0].argmax(-1).cpu()
        states = exit_.states(taken.hidden, torch.ones_like(ids, dtype=torch.bool))[0, said]
        logits = exit_.shared_logits(states).cpu()
        ranks = rank_of(logits, output_of[tokens], torch.ones(len(tokens), dtype=torch.bool))
        losses = distillation_loss(logits, output_of[labels], probabilities)
        yield untrained == tokens, ranks[:, None], losses[:, None]


def _asked(
    model: Any,
    tokenizer: Any,
    data: Path,
    max_new_tokens: int,
    per_task: int | None,
    batch_size: int,
    progress: bool,
) -> tuple[list[Prompt], Answers]:
    """Prompts from a file, and the model's greedy answers."""
    prompts = read_prompts(data, per_task)
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    return prompts, _answered(model, encode(tokenizer, chats), max_new_tokens, batch_size, progress)


def _per_task(prompts: Sequence[Prompt], counted: Sequence[Sequence[tuple[int, int]]]) -> dict[str, list[float]]:
    """Ratios of sums, per task and overall, in the tasks' order; one ratio for each of the counts of all prompts."""
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    found: dict[str, list[float]] = {task: [] for task in (tasks if len(tasks) == 1 else [*tasks, OVERALL])}
    for counts in counted:
        for task, ratios in found.items():
            of_task = [count for count, prompt in zip(counts, prompts, strict=True) if task in (prompt.task, OVERALL)]
            above, below = (sum(part) for part in zip(*of_task, strict=True))
            ratios.append(round(above / below, 3) if below else 1.0)
    return found


def _rounded(found: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: round(value, 4) for name, value in head.items()} for head in found]


def _answered(model: Any, prompts: list[list[int]], max_new_tokens: int, batch_size: int, progress: bool) -> Answers:
    from tqdm.auto import tqdm

    settings = DataSettings(max_new_tokens=max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    said: dict[int, Any] = {}
    for start in tqdm(range(0, len(order), batch_size), desc="answers", unit="batch", disable=not progress):
        batch = order[start : start + batch_size]
        rows = answer(model, [prompts[index] for index in batch], settings, do_sample=False, seed=0)
        said.update(zip(batch, rows, strict=True))
    return joined([said[index] for index in range(len(prompts))], prompts)


@torch.no_grad()
def acceptance_along(
    heads: BoundHeads, answers: Answers, nodes: int, prompt_lookup: bool = False
) -> list[tuple[int, int]]:
    """(tokens, rounds) of every answer, decoded with trees of so many nodes besides the root.

    Args:
        heads: the heads.
        answers: what the base model said.
        nodes: of every tree.
        prompt_lookup: whether what the text said before shares the trees, as it does in mode `medusa`.
    """
    drafter = MedusaDrafter(heads, MedusaModeConfig(prompt_lookup=prompt_lookup))
    device, rows = heads.model.device, range(len(answers.lengths))
    said = [part.tolist() for part in answers.tokens.split(answers.lengths.tolist())]
    starts = (answers.lengths.cumsum(0) - answers.lengths).tolist()
    at, rounds, last = [0] * len(rows), [0] * len(rows), len(answers.hidden) - 1  # of an empty answer none is used

    def context() -> Context:
        return Context(
            tokens=[[*answers.prompts[row], *said[row][: at[row] + 1]] for row in rows],
            prompt_lengths=[len(prompt) for prompt in answers.prompts],
            finished=[at[row] + 1 >= len(said[row]) for row in rows],
            device=device,
            selection=Selection(LogitsProcessorList(), do_sample=False, tape=None),
            padded_prompts=torch.zeros(len(rows), 1, dtype=torch.long, device=device),
            hidden=answers.hidden[[min(starts[row] + at[row], last) for row in rows]].to(device, heads.heads.dtype),
        )

    drafter.start(context())
    while not all((now := context()).finished):
        deepest = [0 if done else nodes for done in now.finished]
        draft = drafter.propose(
            now, Budget(depth=deepest, room=deepest, nodes=nodes, trees=True, pays=lambda confidences: True)
        )
        for row in rows:
            if now.finished[row]:
                continue
            node: int | None = 0
            while node is not None and at[row] + 1 < len(said[row]):
                at[row] += 1
                token, children = said[row][at[row]], draft.children[row][node]
                node = next((child for child in children if draft.tokens[row][child] == token), None)
            rounds[row] += 1
    return list(zip(at, rounds, strict=True))


@torch.no_grad()
def accuracy_along(heads: BoundHeads, answers: Answers) -> list[dict[str, float]]:
    """Per head: loss and top-k accuracy at every position of the answers."""
    positions = Positions(answers, heads.num_heads, heads.outputs())
    learner, found = HeadsInTraining(heads, TrainingSettings()).to(heads.model.device), []
    for start in range(0, len(positions), _POSITIONS):
        batch = positions.__getitems__(range(start, min(start + _POSITIONS, len(positions))))
        found.append(learner(**{name: tensor.to(heads.model.device) for name, tensor in batch.items()}))
    ranks, losses = (torch.cat([part[name] for part in found]) for name in ("ranks", "losses"))
    return _rounded(accuracy(ranks, losses))
