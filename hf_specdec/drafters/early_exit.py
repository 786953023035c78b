"""`early_exit`: the model's own first layers draft, and verification runs only the others.

Draft = the first E layers, the final norm and the LM head. Their keys and hidden states are kept, so that verification
runs the layers above E alone: a round with k drafted tokens runs the layers below the exit k + 1 times and those above
it once. There is one cache, the model's, and no second prefill. Drafting stops when the exit's confidence, as the
controller has come to know it, no longer pays for another token. Beside the likeliest token of every depth the next
likeliest ones are drafted as leaves, which cost nothing until they are verified.

It pays on models whose early layers were trained to predict (LayerSkip checkpoints); on others `exit_layer="auto"`
declines, unless an adapter brings a trained exit, which then stands in for norm and LM head. Where the two halves of a
model, run one after the other, are not the model (`target.selftest.halves_agree`), the early layers draft with a cache
of their own.

References: LayerSkip (arXiv:2404.16710), Draft & Verify (arXiv:2309.08168), Kangaroo (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from ..config import SpeculativeConfig, check_range
from ..context import Context, DraftSampling
from ..draft import Budget, Draft, HiddenRequest, Scores, Verdict
from ..drafter import Drafter
from ..errors import InvalidSettingError, UnsupportedModelError
from ..host.models import execution_device
from ..modes import Request
from ..sampling import forked_generators
from ..target.cached_model import CachedModel
from ..target.halves import Halves
from ..target.layers import find_layers
from ..target.selftest import halves_agree
from ..tree import TreeBuilder
from .assistant import AssistantConfig, AssistantDrafter
from .exit_choice import MARGIN, ExitChoice


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(SpeculativeConfig):
    """Settings of `early_exit`.

    Args:
        exit_layer: E, the number of layers that draft. `"auto"` takes the exit that a loaded adapter was trained for;
            else it measures on the prompts how well a few exits agree with the model and takes the one that promises
            most, or none.
        adapter: name of the adapter with a trained exit; None takes the active one, if there is one.
        num_alternatives: tokens drafted beside the likeliest one at every depth; 0 drafts chains.
        draft_sampling: when the target samples, `"tape"` lets the exit read the target's own noise, so that both pick
            the same token as often as can be (arXiv:2408.07978); `"greedy"` takes its argmax.
    """

    exit_layer: int | Literal["auto"] = "auto"
    adapter: str | None = None
    num_alternatives: int = 1
    draft_sampling: DraftSampling = "tape"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "exit_layer", 1)
        check_range(self, "num_alternatives", 0)


class Reader(Protocol):
    """A trained exit that reads the rows of one call, token by token."""

    def commit(self, row: int, hidden: torch.Tensor) -> None:
        """Forget the drafts of a row, and go on with these committed tokens, hidden states at the exit `[n, d]`."""
        ...

    def start_drafting(self) -> None:
        """Forget what was drafted before and not committed."""
        ...

    def draft(self, rows: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Read one drafted token in each of these rows, `hidden [k, d]`: scores `[k, V_d]` of what follows it."""
        ...


class ExitHeads(Protocol):
    """What the drafter asks of a trained exit that is bound to its model."""

    exit_layer: int

    @property
    def vocab_size(self) -> int:
        """V, of the model's LM head."""
        ...

    def reader(self, rows: int) -> Reader:
        """A reader for so many rows."""
        ...

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[k, V_d]` as scores `[k, V]`."""
        ...


class EarlyExitDrafter(Drafter):
    """Drafts with the first layers of the target itself.

    Args:
        model: the target.
        config: settings.
        trained: an exit that was trained for this model; None takes final norm and LM head.

    Raises:
        InvalidSettingError: the model has no such layer to exit from, or the trained exit is for another.
        UnsupportedModelError: the model's first layers cannot be run by themselves.
    """

    def __init__(self, model: Any, config: EarlyExitConfig | None = None, trained: ExitHeads | None = None) -> None:
        self.model, self.config, self.trained = model, config or EarlyExitConfig(), trained
        if len(find_layers(model)[1]) < 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a single layer, so there is none to exit from. Use another "
                "speculative_mode."
            )
        self.choice = ExitChoice(model)
        self._exits = self._possible_exits()
        self._measures = self.config.exit_layer == "auto" and trained is None
        # whether the layers' work on the draft can be taken over by verification
        self._reuses = halves_agree(model, self._exits[0])
        if not self._reuses and trained is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be run in two halves, so a trained exit cannot draft for it. Use "
                "another speculative_mode."
            )
        if not self._reuses:
            own = self._with_own_cache(self._exits[0])  # raises where that cannot be done either
            self.rows_in_step = own.rows_in_step
        self._target: CachedModel | None = None
        self._prompt_lengths: list[int] = []
        # of this call: the halves that draft with the target's cache, or the draft model with one of its own
        self._halves: Halves | None = None
        self._own_cache: AssistantDrafter | None = None
        self._reader: Reader | None = None
        self._decided = False

    def _possible_exits(self) -> list[int]:
        """The exits that may draft."""
        config, trained, name = self.config, self.trained, type(self.model).__name__
        if trained is not None and config.exit_layer not in ("auto", trained.exit_layer):
            raise InvalidSettingError(
                f"exit_layer is {config.exit_layer}, but the adapter's exit is trained for layer "
                f"{trained.exit_layer}. Leave exit_layer out."
            )
        if trained is not None:
            exits = [trained.exit_layer]
        elif config.exit_layer == "auto":
            exits = self.choice.candidates()
        else:
            exits = [config.exit_layer]
        if exits[-1] >= self.choice.num_layers:
            raise InvalidSettingError(
                f"exit_layer must be between 1 and {self.choice.num_layers - 1} for {name} with its "
                f"{self.choice.num_layers} layers, got {config.exit_layer!r}."
            )
        return exits

    def start(self, context: Context) -> None:
        self._target = self._halves = self._own_cache = self._reader = None
        self._prompt_lengths, self._decided = context.prompt_lengths, False
        if self.trained is not None:
            self.hidden = HiddenRequest((self.trained.exit_layer,), prompt_positions=None)
        elif self._measures and not self.choice.knows(self._exits):
            self.hidden = HiddenRequest(
                prompt_layers=(*self._exits, self.choice.num_layers),
                prompt_positions=self.choice.positions(context.prompt_lengths),
            )
        else:
            self.hidden = HiddenRequest()

    def attach(self, target: CachedModel, prompt: Scores) -> None:
        self._target = target
        if self.trained is not None:
            self._reader = self.trained.reader(len(self._prompt_lengths))
            hidden = prompt.hidden[self.trained.exit_layer]
            for row, length in enumerate(self._prompt_lengths):
                self._reader.commit(row, hidden[row, -length:])
        elif prompt.hidden:
            self.choice.measure(prompt.hidden)

    @torch.no_grad()
    def propose(self, context: Context, budget: Budget) -> Draft:
        if not self._decided:
            self._decide(context, budget)
        if self._own_cache is not None:
            return self._own_cache.propose(context, budget)
        if self._halves is None:
            return Draft.empty(context.roots)
        return self._draft(context, budget)

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        if self._own_cache is not None:
            self._own_cache.observe(context, draft, scores, verdict)
        if self._reader is not None and self.trained is not None:
            hidden = scores.hidden[self.trained.exit_layer]
            for place, row in enumerate(scores.rows):
                if verdict.committed[row]:
                    self._reader.commit(row, hidden[place, verdict.kept[row]])

    # ------------------------------------------------------------------ drafting with the target's cache

    def _draft(self, context: Context, budget: Budget) -> Draft:
        target = self._target
        assert target is not None
        rows = target.rows
        room = {row: 0 if context.finished[row] else min(budget.depth[row], budget.nodes) for row in rows}
        longest = max(room.values())
        if longest <= 0:
            return Draft.empty(context.roots)
        # a window shows a node that comes late less than it must see; what is drawn from q is one chain
        branches = budget.trees and not context.draws_own_noise and not target.has_windows
        width = 1 + (self.config.num_alternatives if branches else 0)
        grown = _ChainsWithLeaves(context)
        if self._reader is not None:
            self._reader.start_drafting()
        logits = self._below([[context.roots[row]] for row in rows], [[-1]] * len(rows))
        for depth in range(1, longest + 1):
            active = [row for row in rows if room[row] >= depth]
            picks = context.pick(
                logits[[rows.index(row) for row in active], -1],
                active,
                [grown.chains[row] for row in active],
                count=width,
                sampling=self.config.draft_sampling,
                draws=True,
            )
            grown.add(active, picks.tokens.tolist(), picks.confidence.tolist(), picks.q)
            if depth == longest or not budget.pays([grown.confidence[row] for row in rows if room[row] > 0]):
                break
            following = [[grown.chains[row][-1]] if room[row] > depth else [] for row in rows]
            logits = self._below(following, [[depth - 1] * len(new) for new in following])
        return grown.draft()

    def _below(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> torch.Tensor:
        """The exit's scores `[B, 1, V]` of what follows these nodes, one per row or none."""
        target, halves = self._target, self._halves
        assert target is not None
        assert halves is not None
        if self._reader is None or self.trained is None:
            return target.forward_below(halves, tokens, parents)
        hidden = target.hidden_below(halves, tokens, parents)[:, -1]
        places = [place for place, new in enumerate(tokens) if new]
        logits = self._reader.draft([target.rows[place] for place in places], hidden[places])
        spread = logits.new_zeros(len(tokens), 1, self.trained.vocab_size)
        spread[places, 0] = self.trained.spread(logits)
        return spread

    # ------------------------------------------------------------------ choosing an exit

    def _decide(self, context: Context, budget: Budget) -> None:
        """Choose the exit of this call, or none."""
        self._decided = True
        promises = {layer: self.choice.promise(layer, budget.cost, self._reuses) for layer in self._exits}
        best = max(self._exits, key=lambda exit_layer: promises[exit_layer])
        # where costs are not weighed, a draft is wanted whatever it costs
        if self._measures and budget.cost is not None and promises[best] < MARGIN:
            return
        if self._reuses and self._target is not None and halves_agree(self.model, best):
            self._halves = Halves(self.model, best)
        else:
            self._own_cache = self._with_own_cache(best)
            self._own_cache.start(context)

    def _with_own_cache(self, exit_layer: int) -> AssistantDrafter:
        halves = Halves(self.model, exit_layer)
        with forked_generators(execution_device(self.model)):
            try:
                with halves.taken():
                    return AssistantDrafter(halves.below, AssistantConfig(draft_sampling=self.config.draft_sampling))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(
                    f"The first {exit_layer} layers of {type(self.model).__name__} cannot draft: {error}"
                ) from error


def build(request: Request, config: Any) -> EarlyExitDrafter:
    """The drafter of mode `early_exit`, with a trained exit where one is asked for or loaded."""
    trained = None
    # (a model without adapters has none, and PEFT need not be imported to see that)
    if config.adapter is not None or (config.exit_layer == "auto" and getattr(request.model, "peft_config", None)):
        from ..heads import find_heads, has_heads

        if config.adapter is not None or has_heads(request.model, mode="early_exit"):
            trained = find_heads(request.model, config.adapter, mode="early_exit")
    return EarlyExitDrafter(request.model, config, trained)


class _ChainsWithLeaves:
    """A chain per row, with leaves beside it."""

    def __init__(self, context: Context) -> None:
        self.trees = [TreeBuilder(root) for root in context.roots]
        # per row: the chain's tokens and their confidences
        self.chains: list[list[int]] = [[] for _ in self.trees]
        self.confidence: list[list[float]] = [[] for _ in self.trees]
        self._ends = [0 for _ in self.trees]  # node where each chain ends
        self._columns: list[torch.Tensor] = []  # per depth, [B, V]: what tokens were drawn from

    def add(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        confidence: Sequence[Sequence[float]],
        q: torch.Tensor | None,
    ) -> None:
        """In each of these rows, the first token goes on with the chain, the others are leaves beside it."""
        for row, picked, values in zip(rows, tokens, confidence, strict=True):
            tree, end = self.trees[row], self._ends[row]
            self._ends[row], *_ = (tree.add(end, token, value) for token, value in zip(picked, values, strict=True))
            self.chains[row].append(picked[0])
            self.confidence[row].append(values[0])
        if q is not None:
            column = q.new_zeros(len(self.trees), q.shape[1])
            column[list(rows)] = q
            self._columns.append(column)

    def draft(self) -> Draft:
        """The draft, with q where tokens were drawn: a column per depth, after one for the root."""
        columns = self._columns
        return Draft.of(self.trees, q=torch.stack([columns[0], *columns], dim=1) if columns else None)
