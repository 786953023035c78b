"""What heads predict of texts that they were not trained on, without decoding again for every size of tree.

The base model answers the prompts once, greedily; accuracy and acceptance are then counted along its answers. Lossless
decoding commits these very tokens, so the acceptance is the one that `generate` would meet with trees of a fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..config import make_config
from ..context import Context
from ..draft import LAST_HIDDEN, Budget, Draft, Scores, Verdict
from ..drafter import Drafter
from ..errors import ConfigurationError
from ..heads.answers import Answers
from ..heads.finding import find_heads
from ..heads.kind import HeadKind, Table, kind_of
from ..measure.prompts import read_prompts
from ..measure.report import OVERALL, Prompt
from ..modes import Request, get_mode
from ..sampling import Selection
from .data import DataSettings, answer, joined
from .prompts import encode

# sizes of trees that are tried unless others are asked for, the root not counted
NODES = (2, 7, 15, 31, 63)


@dataclass(frozen=True)
class Evaluation:
    """What was counted of heads; part of an adapter's provenance."""

    data: str
    prompts: int
    positions: int
    max_new_tokens: int
    # of every head: {"loss": ..., "top1": ..., "top10": ...}
    heads: list[dict[str, float]]
    # drafted nodes of the trees that were tried; none where the kind has no table of them
    nodes: list[int]
    # name of a `heads.kind.Table` -> task -> a value per column: a ratio, or, per size of tree, the mean acceptance
    # length (tokens per forward of the base model)
    tables: dict[str, dict[str, list[float]]]

    def to_dict(self) -> dict[str, Any]:
        """As it is saved."""
        return {
            "data": self.data,
            "prompts": self.prompts,
            "positions": self.positions,
            "max_new_tokens": self.max_new_tokens,
            "heads": self.heads,
            **({"nodes": self.nodes} if self.nodes else {}),
            **self.tables,
        }


def evaluate_heads(
    model: Any,
    tokenizer: Any,
    data: Path,
    adapter: str | None = None,
    nodes: Sequence[int] | None = None,
    max_new_tokens: int = 128,
    per_task: int | None = None,
    batch_size: int = 10,
    progress: bool = True,
) -> Evaluation:
    """Count how well heads predict a model's greedy answers.

    Main arguments:
        model: the base model with the heads loaded.
        tokenizer: its tokenizer.
        data: JSON Lines of prompts, with their `task` perhaps (`measure.prompts.read_prompts`).

    Other arguments:
        adapter: name of the heads; None takes the active ones.
        nodes: sizes of trees to try, the root not counted; None takes `NODES`. Only for heads that draft trees from the
            last hidden state.
        max_new_tokens: most tokens of an answer, at least 3.
        per_task: most prompts of a task; None takes all.
        batch_size: prompts answered at once.
        progress: whether to show progress bars.

    Raises:
        AdapterError: the model has no such heads.
        ConfigurationError: the prompts cannot be read, or a setting is out of range.
        TrainingDataError: the answers are too short to count anything on.
    """
    if (nodes is not None and (not nodes or min(nodes) < 1)) or max_new_tokens < 3 or batch_size < 1:
        raise ConfigurationError("nodes and batch_size must be at least 1, and max_new_tokens at least 3.")
    heads = find_heads(model, adapter)
    kind = kind_of(heads.config)
    replayed = [table for table in kind.tables if table.columns is None]
    if nodes is not None and not replayed:
        raise ConfigurationError(
            f"nodes are of trees, and acceptance with trees cannot be counted for heads of kind {kind.name!r}. Leave "
            "them out."
        )
    sizes = list(nodes or NODES) if replayed else []
    prompts = read_prompts(data, per_task)
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    answers = _answered(model, encode(tokenizer, chats), max_new_tokens, batch_size, progress)
    accuracy = kind.accuracy(heads, answers, progress)
    counts = {
        **accuracy.counts,
        **{table.name: _acceptance(model, kind, table, adapter, answers, sizes) for table in replayed},
    }
    return Evaluation(
        data=data.name,
        prompts=len(prompts),
        positions=len(answers.tokens),
        max_new_tokens=max_new_tokens,
        heads=[{name: round(value, 4) for name, value in head.items()} for head in accuracy.heads],
        nodes=sizes,
        tables={table.name: _per_task(prompts, counts[table.name]) for table in kind.tables},
    )


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


# ---------------------------------------------------------------- acceptance along answers


def _acceptance(
    model: Any, kind: HeadKind, table: Table, adapter: str | None, answers: Answers, sizes: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Per size of tree, (tokens, rounds) of every answer, as the kind's mode would decode it."""
    mode = get_mode(kind.mode)
    config = make_config(mode.config, {**table.settings, "adapter": adapter}, mode.name)
    return [acceptance_along(model, mode.build(Request(model), config), answers, size) for size in sizes]


@torch.no_grad()
def acceptance_along(model: Any, drafter: Drafter, answers: Answers, nodes: int) -> list[tuple[int, int]]:
    """(tokens, rounds) of every answer, decoded with trees of so many nodes besides the root.

    Args:
        model: the base model.
        drafter: drafts from nothing but the last hidden state and the text.
        answers: what the base model said.
        nodes: of every tree.

    Raises:
        ConfigurationError: the drafter reads other hidden states, which were not recorded.
    """
    replay = _Replay(model, answers)
    drafter.start(replay.context())
    if not set(drafter.hidden.layers) <= {LAST_HIDDEN}:
        raise ConfigurationError(
            f"{type(drafter).__name__} reads hidden states of layers {drafter.hidden.layers}; only the last hidden "
            "state is recorded with answers."
        )
    while not replay.done:
        context = replay.context()
        replay.show(drafter, context)
        depth = [0 if done else nodes for done in context.finished]
        replay.accept(
            drafter.propose(
                context, Budget(depth=depth, room=depth, nodes=nodes, trees=True, pays=lambda confidences: True)
            )
        )
    return list(zip(replay.at, replay.rounds, strict=True))


class _Replay:
    """Recorded answers, gone along with the drafts of a drafter as greedy decoding would have gone."""

    def __init__(self, model: Any, answers: Answers) -> None:
        self.device, self.dtype = model.device, model.dtype
        self.prompts, self.hidden = answers.prompts, answers.hidden
        self.said = [part.tolist() for part in answers.tokens.split(answers.lengths.tolist())]
        self.starts = (answers.lengths.cumsum(0) - answers.lengths).tolist()
        # per answer: the token committed last, counted from 0, and the rounds so far
        self.at, self.rounds = [0] * len(self.said), [0] * len(self.said)

    @property
    def done(self) -> bool:
        return all(self._finished())

    def _finished(self) -> list[bool]:
        return [at + 1 >= len(said) for at, said in zip(self.at, self.said, strict=True)]

    def context(self) -> Context:
        """What has been committed."""
        return Context(
            tokens=[
                [*prompt, *said[: at + 1]] for prompt, said, at in zip(self.prompts, self.said, self.at, strict=True)
            ],
            prompt_lengths=[len(prompt) for prompt in self.prompts],
            finished=self._finished(),
            device=self.device,
            selection=Selection(LogitsProcessorList(), do_sample=False, tape=None),
            padded_prompts=torch.zeros(len(self.said), 1, dtype=torch.long, device=self.device),
        )

    def show(self, drafter: Drafter, context: Context) -> None:
        """Show a drafter the hidden states that gave the tokens committed last, as after a plain step."""
        rows, last = range(len(self.said)), len(self.hidden) - 1  # of an empty answer none is used
        states = self.hidden[[min(self.starts[row] + self.at[row], last) for row in rows]]
        states = states.to(self.device, self.dtype)[:, None]
        drafter.observe(
            context,
            Draft.empty(context.roots),
            Scores(logits=states, rows=list(rows), hidden={LAST_HIDDEN: states}),
            Verdict(kept=[[0]] * len(rows), committed=[[root] for root in context.roots], accepted=[0] * len(rows)),
        )

    def accept(self, draft: Draft) -> None:
        """A round: each answer goes on along the draft, and by one token more."""
        for row, (said, done) in enumerate(zip(self.said, self._finished(), strict=True)):
            if done:
                continue
            node: int | None = 0
            while node is not None and self.at[row] + 1 < len(said):
                self.at[row] += 1
                token, children = said[self.at[row]], draft.children[row][node]
                node = next((child for child in children if draft.tokens[row][child] == token), None)
            self.rounds[row] += 1
