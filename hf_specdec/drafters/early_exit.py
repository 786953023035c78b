"""`early_exit`: the model's own first layers draft, and verification runs only the others.

Draft = the first E layers, the final norm and the LM head. Their keys and hidden states are kept, so that verification
runs the layers above E alone: a round with k drafted tokens runs the layers below the exit k + 1 times and those above
it once. There is one cache, the model's, and no second prefill. Drafting stops when the exit's confidence, as the
controller has come to know it, no longer pays for another token. Beside the likeliest token of every depth the next
likeliest ones are drafted as leaves, which cost nothing until they are verified.

It pays on models whose early layers were trained to predict (LayerSkip checkpoints); on others `exit_layer="auto"`
declines, unless an adapter brings a trained exit (`heads.exit`), which then stands in for norm and LM head. Where the
two halves of a model, run one after the other, are not the model (see `structure.halves_agree`), the early layers draft
with a cache of their own.

References: LayerSkip (arXiv:2404.16710), Draft & Verify (arXiv:2309.08168), Kangaroo (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..config import AssistantConfig, EarlyExitConfig
from ..draft import Budget, Context, Draft, Scores, Verdict
from ..drafter import Drafter
from ..errors import InvalidSettingError, UnsupportedModelError
from ..heads.exit import BoundExit, ExitReader
from ..target.cached_model import CachedModel
from ..target.halves import Halves, Handover, find_layers, head_logits, watch
from ..target.support import halves_agree, support
from .assistant import AssistantDrafter

# exits that "auto" measures, as parts of the layers
_EXITS = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
# positions of the prompts that a call measures, how far back they reach, and how many are enough for a model
_POSITIONS, _REACH, _ENOUGH = 16, 256, 128
# an exit must promise this much more than plain decoding
_MARGIN = 1.1
_LONGEST_DRAFT = 8

# model -> exit -> [positions where it agreed with the model, positions measured]
_agreement: WeakKeyDictionary[Any, dict[int, list[int]]] = WeakKeyDictionary()


class EarlyExitDrafter(Drafter):
    """Drafts with the first layers of the target itself.

    Args:
        model: the target.
        config: settings.
        trained: an exit that was trained for this model (`heads.find_exit`); None takes final norm and LM head.

    Raises:
        InvalidSettingError: the model has no such layer to exit from, or the trained exit is for another.
        UnsupportedModelError: the model's first layers cannot be run by themselves.
    """

    def __init__(self, model: Any, config: EarlyExitConfig | None = None, trained: BoundExit | None = None) -> None:
        self.model, self.config, self.trained = model, config or EarlyExitConfig(), trained
        _, layers = find_layers(model)
        self.num_layers = len(layers)
        if self.num_layers < 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a single layer, so there is none to exit from. Use another "
                "speculative_mode."
            )
        self._layer_size = sum(weight.numel() for layer in layers for weight in layer.parameters()) / len(layers)
        if trained is not None:
            if self.config.exit_layer not in ("auto", trained.exit_layer):
                raise InvalidSettingError(
                    f"exit_layer is {self.config.exit_layer}, but the adapter's exit is trained for layer "
                    f"{trained.exit_layer}. Leave exit_layer out."
                )
            self._exits = [trained.exit_layer]
        elif self.config.exit_layer == "auto":
            self._exits = sorted({min(max(1, round(part * len(layers))), len(layers) - 1) for part in _EXITS})
        else:
            self._exits = [self.config.exit_layer]
        if self._exits[-1] >= len(layers):
            raise InvalidSettingError(
                f"exit_layer must be between 1 and {len(layers) - 1} for {type(model).__name__} with its "
                f"{len(layers)} layers, got {self.config.exit_layer!r}."
            )
        self._measures = self.config.exit_layer == "auto" and trained is None
        # whether the layers' work on the draft can be taken over by verification
        self._reuses = halves_agree(model, self._exits[0])
        if not self._reuses and trained is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be run in two halves, so a trained exit cannot draft for it. Use "
                "another speculative_mode."
            )
        if not self._reuses:
            self._with_own_cache(self._exits[0])  # raises where that cannot be done either
        self._target: CachedModel | None = None
        self._watched: dict[int, Handover] = {}
        self._halves: Halves | None = None
        self._own_cache: AssistantDrafter | None = None
        self._reader: ExitReader | None = None
        self._decided = False

    def start(self, context: Context) -> None:
        self._target = self._halves = self._own_cache = self._reader = None
        self._prompt_lengths = context.prompt_lengths
        if not self._reuses and context.batch_size > 1 and not support(self.model).movable:
            raise UnsupportedModelError(
                f"The early layers of {type(self.model).__name__} draft with a cache of their own, which cannot "
                "advance the rows of a batch by different lengths. Use batch size 1 or another speculative_mode."
            )
        self._decided = False
        self._watched.clear()  # an exception may have left what an earlier call saw
        reach = min(_REACH, *context.prompt_lengths)
        count = max(1, _POSITIONS // context.batch_size)
        self._positions = [-1 - place * reach // count for place in range(min(count, reach))]

    def watching(self) -> AbstractContextManager[Any]:
        if self.trained is not None:
            return watch(self.model, self._exits, None, self._watched)
        agreed = _agreement.get(self.model, {})
        if not self._measures or all(agreed.get(exit_layer, [0, 0])[1] >= _ENOUGH for exit_layer in self._exits):
            return nullcontext()
        return watch(self.model, [*self._exits, self.num_layers], self._positions, self._watched)

    def attach(self, target: CachedModel) -> None:
        self._target = target
        if self.trained is not None:
            target.tap = self.trained.exit_layer
            self._reader = ExitReader(self.trained, len(self._prompt_lengths))
            hidden = self._watched.pop(self.trained.exit_layer).hidden
            assert hidden is not None
            for row, length in enumerate(self._prompt_lengths):
                self._reader.commit(row, hidden[row, -length:])
        elif self._watched:
            self._measure()

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
        if self._reader is not None and self._target is not None:
            hidden = self._target.tapped
            assert hidden is not None
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
        tree = _ChainsWithLeaves(context)
        columns: list[torch.Tensor] = []
        if self._reader is not None:
            self._reader.start_drafting()
        logits = self._below([[context.tokens[row][-1]] for row in rows], [[-1]] * len(rows))
        for depth in range(1, longest + 1):
            active = [row for row in rows if room[row] >= depth]
            index = [rows.index(row) for row in active]
            tokens, probabilities = self._pick(context, logits[index, -1], active, tree.chains, width)
            if context.draws_own_noise and self.config.draft_sampling == "tape":
                columns.append(_spread(probabilities, active, context.batch_size))
            confidence = probabilities.gather(1, tokens).tolist()
            for row, picked, values in zip(active, tokens.tolist(), confidence, strict=True):
                tree.add(row, picked, values)
            if depth == longest or not budget.pays([tree.chain_confidence[row] for row in rows if room[row] > 0]):
                break
            on = [row for row in active if room[row] > depth]
            following = [[tree.chains[row][-1]] if row in on else [] for row in rows]
            logits = self._below(following, [[depth - 1] * len(new) for new in following])
        return tree.draft(torch.stack([columns[0], *columns], dim=1) if columns else None)

    def _below(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> torch.Tensor:
        """The exit's scores `[B, 1, V]` of what follows these nodes, one a row or none."""
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

    def _pick(
        self, context: Context, logits: torch.Tensor, rows: Sequence[int], chains: Sequence[list[int]], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of these rows `[k, width]`, the best one first, and the exit's probabilities `[k, V]`."""
        drafted = [chains[row] for row in rows]
        probabilities = context.probabilities(logits, rows, drafted)
        if self.config.draft_sampling == "greedy":
            return probabilities.topk(min(width, probabilities.shape[-1])).indices, probabilities
        if context.draws_own_noise:
            return torch.multinomial(probabilities, 1), probabilities
        steps = [context.step(row) + len(chain) for row, chain in zip(rows, drafted, strict=True)]
        ranked = context.coupled(probabilities, rows, steps)
        return ranked.topk(min(width, ranked.shape[-1])).indices, probabilities

    # ------------------------------------------------------------------ choosing an exit

    def _measure(self) -> None:
        """Count where each exit agreed with the model on the prompts."""
        hidden = [self._watched[exit_layer].hidden for exit_layer in [*self._exits, self.num_layers]]
        tuple_length = self._watched[self.num_layers].tuple_length
        stacked = torch.stack([tensor.flatten(0, 1) for tensor in hidden if tensor is not None])
        tokens = head_logits(self.model, Handover(stacked, tuple_length)).argmax(-1)
        counts = _agreement.setdefault(self.model, {})
        for exit_layer, own in zip(self._exits, tokens[:-1], strict=True):
            known = counts.setdefault(exit_layer, [0, 0])
            known[0] += int((own == tokens[-1]).sum())
            known[1] += tokens.shape[1]
        self._watched.clear()

    def _decide(self, context: Context, budget: Budget) -> None:
        """Choose the exit of this call, or none."""
        self._decided = True
        promises = {exit_layer: self._promise(exit_layer, budget) for exit_layer in self._exits}
        best = max(self._exits, key=lambda exit_layer: promises[exit_layer])
        # where nobody weighs costs, a draft is wanted whatever it costs
        if self._measures and budget.cost is not None and promises[best] < _MARGIN:
            return
        if self._reuses and self._target is not None and halves_agree(self.model, best):
            self._halves = Halves(self.model, best)
        else:
            self._own_cache = self._with_own_cache(best)
            self._own_cache.start(context)

    def _promise(self, exit_layer: int, budget: Budget) -> float:
        """Expected speed-up at the best draft length, by the agreement measured and what forwards cost."""
        agreed, seen = _agreement.get(self.model, {}).get(exit_layer, [0, 0])
        acceptance = (agreed + 0.5) / (seen + 1.0)
        # a step is bound by the weights it reads
        output = self.model.get_output_embeddings()
        head = 0 if output is None else output.weight.numel()
        whole = self.num_layers * self._layer_size + head
        below, draft = exit_layer * self._layer_size / whole, (exit_layer * self._layer_size + head) / whole
        best, reached, tokens = 0.0, 1.0, 1.0
        for length in range(1, _LONGEST_DRAFT + 1):
            reached *= acceptance
            tokens += reached
            forward = budget.cost(length + 1) if budget.cost is not None else 1.0
            verification = below + (1.0 - below) * forward if self._reuses else forward
            best = max(best, tokens / (length * draft + verification))
        return best

    def _with_own_cache(self, exit_layer: int) -> AssistantDrafter:
        halves = Halves(self.model, exit_layer)
        with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []):
            try:
                with halves.taken():
                    return AssistantDrafter(halves.below, AssistantConfig(draft_sampling=self.config.draft_sampling))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(
                    f"The first {exit_layer} layers of {type(self.model).__name__} cannot draft: {error}"
                ) from error


class _ChainsWithLeaves:
    """A chain per row, with leaves beside it."""

    def __init__(self, context: Context) -> None:
        batch = range(context.batch_size)
        self.chains: list[list[int]] = [[] for _ in batch]
        self.chain_confidence: list[list[float]] = [[] for _ in batch]
        self._ends = [0 for _ in batch]  # node where each chain ends
        self._tokens = [[root] for root in context.roots]
        self._parents = [[-1] for _ in batch]
        self._confidence = [[1.0] for _ in batch]

    def add(self, row: int, tokens: Sequence[int], confidence: Sequence[float]) -> None:
        """The first of these tokens goes on with the chain, the others are leaves beside it."""
        end = len(self._tokens[row])
        self._tokens[row] += tokens
        self._parents[row] += [self._ends[row]] * len(tokens)
        self._confidence[row] += [min(1.0, value) for value in confidence]
        self._ends[row] = end
        self.chains[row].append(tokens[0])
        self.chain_confidence[row].append(confidence[0])

    def draft(self, q: torch.Tensor | None) -> Draft:
        return Draft(self._tokens, self._parents, confidence=self._confidence, q=q)


def _spread(probabilities: torch.Tensor, rows: Sequence[int], batch_size: int) -> torch.Tensor:
    """Probabilities `[k, V]` of some rows as `[B, V]`, zeros elsewhere."""
    spread = probabilities.new_zeros(batch_size, probabilities.shape[1])
    spread[list(rows)] = probabilities
    return spread
