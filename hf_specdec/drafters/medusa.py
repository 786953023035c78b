"""`medusa`: trained heads on the target's last hidden state draft a token tree.

The hidden state that gave the last committed token is at hand from its verification (or from the prompt), so a draft
costs no forward of the target. Head k scores the tokens k + 2 positions on: independent heads (Medusa) see the hidden
state alone, sequential ones (Hydra) also the tokens drafted before. The tree is grown level by level, best first: what
cannot be among the `budget.nodes` most probable paths is not grown further. What the text said before after the
current suffix shares the tree, since heads cannot look back. When the target samples, candidates are
ranked by `q / E_t` over the target's own noise (arXiv:2408.07978), so that the likeliest pick comes first.

References: Medusa (arXiv:2401.10774), Hydra (arXiv:2402.05109), dynamic trees (EAGLE-2, arXiv:2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import ClassVar, Protocol

import torch

from ..config import MedusaModeConfig
from ..draft import Budget, Context, Draft
from ..drafter import Drafter
from ..errors import InvalidSettingError
from ..heads.module import BoundHeads
from .prompt_lookup import PromptLookupDrafter

# most nodes of a row that a level goes on from, and how many nodes of the whole tree are one of them
_BEAM, _NODES_A_BEAM = 4, 4


class MedusaDrafter(Drafter):
    """Drafts with heads beside the target's LM head.

    Args:
        heads: the heads and the model they are for (`heads.find_heads`).
        config: settings.

    Raises:
        InvalidSettingError: a static tree is deeper than there are heads.
    """

    needs_hidden: ClassVar[bool] = True

    def __init__(self, heads: BoundHeads, config: MedusaModeConfig | None = None) -> None:
        self.heads, self.config = heads, config or MedusaModeConfig()
        self._static = None if self.config.tree is None else {tuple(path) for path in self.config.tree}
        self._lookup: PromptLookupDrafter | None = None
        deepest = 0 if self._static is None else max(map(len, self._static))
        if deepest > heads.num_heads:
            raise InvalidSettingError(
                f"tree is {deepest} deep, but there are only {heads.num_heads} heads to draft with."
            )

    def start(self, context: Context) -> None:
        if self.config.prompt_lookup and self._static is None:
            self._lookup = PromptLookupDrafter()
            self._lookup.start(context)
            self.drafts_for_free = True

    def propose(self, context: Context, budget: Budget) -> Draft:
        draft = _nothing(context) if budget.free_only else self._foreseen(context, budget)
        if self._lookup is not None:
            draft = draft.joined(self._lookup.propose(context, budget), budget.nodes)
        return draft if budget.trees else draft.best_chain()

    @torch.no_grad()
    def _foreseen(self, context: Context, budget: Budget) -> Draft:
        """What the heads draft."""
        depth = [min(depth, self.heads.num_heads) for depth in budget.depth]
        if budget.nodes < 1:
            return _nothing(context)
        rows = [row for row in range(context.batch_size) if depth[row] > 0 and not context.finished[row]]
        if context.hidden is None or not rows:
            return _nothing(context)
        speaker: _Speaker = (_Sequential if self.heads.is_sequential else _Independent)(self.heads, context, rows)
        children = min(self.config.max_children, budget.nodes) if budget.trees else 1
        if self._static is not None:
            children = 1 + max(rank for path in self._static for rank in path)
        growing = {row: _GrowingTree(context.roots[row]) for row in rows}
        frontier = [_Place(row, 0) for row in rows]
        for level in range(max(depth)):
            frontier = [place for place in frontier if depth[place.row] > level]
            if not frontier:
                break
            paths = [growing[place.row].path(place.node) for place in frontier]
            tokens, confidence = self._candidates(context, speaker, level, frontier, paths, children)
            nodes = [
                growing[place.row].add(place.node, below, values, self._static)
                for place, below, values in zip(frontier, tokens, confidence, strict=True)
            ]
            frontier = [
                _Place(row, node, index)
                for row in rows
                for node, index in self._promising(growing[row], row, frontier, nodes, budget)
            ]
            if self._static is None and not budget.pays([growing[row].best_path() for row in rows]):
                break
        grown = [growing[row] if row in growing else _GrowingTree(root) for row, root in enumerate(context.roots)]
        most = max(map(len, grown)) if self._static is not None else budget.nodes
        best = [row.best(most) for row in grown]
        return Draft(
            tokens=[tokens for tokens, _, _ in best],
            parents=[parents for _, parents, _ in best],
            confidence=[confidence for _, _, confidence in best],
        )

    def _promising(
        self, tree: _GrowingTree, row: int, frontier: list[_Place], nodes: list[list[int]], budget: Budget
    ) -> list[tuple[int, int]]:
        """(node, index of its parent in the frontier) of the newest nodes that are worth going on from."""
        new = [
            (node, index)
            for index, (place, children) in enumerate(zip(frontier, nodes, strict=True))
            if place.row == row
            for node in children
        ]
        if self._static is not None:
            return [(node, index) for node, index in new if tree.has_static_children(node, self._static)]
        if not budget.trees:
            return new[:1]
        reached = tree.reached
        likeliest = nlargest(budget.nodes, reached[1:])
        least = likeliest[-1] if len(likeliest) == budget.nodes else 0.0
        beam = max(_BEAM, budget.nodes // _NODES_A_BEAM)
        return nlargest(beam, [item for item in new if reached[item[0]] >= least], key=lambda item: reached[item[0]])

    def _candidates(
        self,
        context: Context,
        speaker: _Speaker,
        level: int,
        frontier: Sequence[_Place],
        paths: Sequence[list[int]],
        count: int,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """For every place the `count` best tokens below it, the best first, and what the head thinks of each."""
        logits = speaker.logits(level, frontier, [path[-1] if path else None for path in paths])
        rows = [place.row for place in frontier]
        processes = bool(context.selection.processors) and context.selection.is_row_wise
        reads_tape = context.tape is not None and self.config.draft_sampling == "tape"
        if not processes and not reads_tape:
            count = min(count, logits.shape[-1])
            best = logits.topk(count)
            confidence = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
            return self.heads.tokens(best.indices).tolist(), confidence.tolist()
        probabilities = context.probabilities(self.heads.spread(logits), rows, paths)
        ranked = probabilities
        if reads_tape:
            ranked = context.coupled(probabilities, rows, [context.step(row) + level for row in rows])
        tokens = ranked.topk(min(count, ranked.shape[-1])).indices
        return tokens.tolist(), probabilities.gather(1, tokens).tolist()


def _nothing(context: Context) -> Draft:
    return Draft.chains(context.roots, [[]] * context.batch_size, [[]] * context.batch_size)


@dataclass(frozen=True)
class _Place:
    """A node that is gone on from."""

    row: int
    node: int
    # index of its parent among the places of the level before
    parent: int = 0


class _Speaker(Protocol):
    """What the heads say."""

    def logits(self, level: int, places: Sequence[_Place], tokens: Sequence[int | None]) -> torch.Tensor:
        """Scores `[f, V_d]` of the tokens below each place; `tokens` stand there, None for the roots."""
        ...


class _Independent:
    """Heads that see the hidden state alone: the same scores wherever in a row's level."""

    def __init__(self, heads: BoundHeads, context: Context, rows: Sequence[int]) -> None:
        assert context.hidden is not None
        self._index = {row: index for index, row in enumerate(rows)}
        self._logits = heads.all_logits(heads.all_states(context.hidden[list(rows)]))

    def logits(self, level: int, places: Sequence[_Place], tokens: Sequence[int | None]) -> torch.Tensor:
        return self._logits[level, [self._index[place.row] for place in places]]


class _Sequential:
    """Heads that go on from the head before and the token drafted there."""

    def __init__(self, heads: BoundHeads, context: Context, rows: Sequence[int]) -> None:
        assert context.hidden is not None
        self._heads = heads
        self._states = heads.start(context.hidden[list(rows)])
        self._roots = [context.roots[row] for row in rows]

    def logits(self, level: int, places: Sequence[_Place], tokens: Sequence[int | None]) -> torch.Tensor:
        if level:
            self._states = self._states[[place.parent for place in places]]
            self._roots = [token for token in tokens if token is not None]
        ids = torch.tensor(self._roots, device=self._states.device)
        self._states = self._heads.step(level, self._states, ids)
        return self._heads.logits(level, self._states)


class _GrowingTree:
    """A row's tree while it grows."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.confidence = [root], [-1], [1.0]
        # probability that each node is reached, by the drafter's own word
        self.reached = [1.0]
        self._ranks: list[tuple[int, ...]] = [()]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, parent: int, tokens: Sequence[int], confidence: Sequence[float], static: set[tuple[int, ...]] | None
    ) -> list[int]:
        """Put candidates below a node, those of a static tree only if they are in it. Returns their nodes."""
        new = []
        for rank, (token, value) in enumerate(zip(tokens, confidence, strict=True)):
            ranks = (*self._ranks[parent], rank)
            if static is not None and ranks not in static:
                continue
            if value <= 0.0 and static is None:
                break  # the target's processors rule it out
            new.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.confidence.append(min(1.0, value))
            self.reached.append(self.reached[parent] * min(1.0, value))
            self._ranks.append(ranks)
        return new

    def has_static_children(self, node: int, static: set[tuple[int, ...]]) -> bool:
        """Whether a static tree goes on from here."""
        ranks = self._ranks[node]
        return any(path[:-1] == ranks for path in static)

    def path(self, node: int) -> list[int]:
        """Tokens from below the root to this node."""
        path: list[int] = []
        while node > 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def best_path(self) -> list[float]:
        """Confidences along the likeliest path to the deepest level."""
        deepest = max(range(len(self)), key=lambda node: (len(self._ranks[node]), self.reached[node]))
        path: list[float] = []
        while deepest > 0:
            path.append(self.confidence[deepest])
            deepest = self.parents[deepest]
        return path[::-1]

    def best(self, nodes: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and confidences of the likeliest `nodes` nodes and the root."""
        kept = [0, *sorted(nlargest(nodes, range(1, len(self)), key=lambda node: (self.reached[node], -node)))]
        index = {node: place for place, node in enumerate(kept)}
        return (
            [self.tokens[node] for node in kept],
            [-1 if node == 0 else index[self.parents[node]] for node in kept],
            [self.confidence[node] for node in kept],
        )
