"""`medusa`: trained heads on the target's last hidden state draft a token tree.

The hidden state that gave the last committed token is at hand from its verification (or from the prompt), so a draft
costs no forward of the target. Head k, counted from 1, scores the tokens k + 1 positions after that state's own:
independent heads (Medusa) see the hidden state alone, sequential ones (Hydra) also the tokens drafted before. The tree
is grown level by level, best first: what cannot be among the `budget.nodes` most probable paths is not grown further.
What followed the current suffix earlier in the text shares the tree, since heads cannot look back. When the target
samples, candidates are ranked by `q / E_t` over the target's own noise (arXiv:2408.07978), so that the token it will
most probably pick comes first.

References: Medusa (arXiv:2401.10774), Hydra (arXiv:2402.05109), dynamic trees (EAGLE-2, arXiv:2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, Protocol

import torch

from ..config import SpeculativeConfig, check_range
from ..context import Context, DraftSampling
from ..draft import LAST_HIDDEN, Budget, Draft, HiddenRequest, Scores, Verdict
from ..drafter import Drafter
from ..errors import InvalidSettingError
from ..modes import Request
from ..target.cached_model import CachedModel
from ..tree import TreeBuilder
from .prompt_lookup import PromptLookupDrafter

# most nodes of a row that a level goes on from, and how many nodes of the whole tree are one of them
_BEAM, _NODES_A_BEAM = 4, 4


@dataclass(frozen=True, kw_only=True)
class MedusaModeConfig(SpeculativeConfig):
    """Settings of `medusa`. (Those of the heads themselves are `heads.MedusaConfig`.)

    Args:
        adapter: name of the adapter whose heads draft; None takes the active one.
        tree: a static tree, as a list of rank paths: `[[0], [1], [0, 0]]` is the best and the second best token of
            the first head, and below the best one the best of the second. It is drafted whole, every round, and sets
            num_draft_tokens. None grows the likeliest tree anew every round.
        max_children: most tokens tried below a node of a tree that grows.
        prompt_lookup: whether a tree that grows also holds what followed the current suffix earlier in the text, as in
            mode `prompt_lookup`. It costs next to nothing, and heads cannot look back.
        draft_sampling: when the target samples, `"tape"` ranks candidates over the target's own noise, so that the
            token it will pick tends to come first (arXiv:2408.07978); `"greedy"` ranks them by probability.
    """

    adapter: str | None = None
    tree: list | tuple | None = None
    max_children: int = 10
    prompt_lookup: bool = True
    draft_sampling: DraftSampling = "tape"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_children", 1)
        if self.tree is not None:
            _check_rank_paths(self.tree)
            if self.num_draft_tokens not in ("auto", len(self.tree)):
                raise InvalidSettingError(
                    f"tree has {len(self.tree)} nodes, so num_draft_tokens cannot be {self.num_draft_tokens}. Leave it "
                    "out."
                )
            object.__setattr__(self, "num_draft_tokens", len(self.tree))


def _check_rank_paths(tree: Any) -> None:
    paths = {
        tuple(path)
        for path in tree
        if isinstance(path, (list, tuple)) and all(type(rank) is int and 0 <= rank < 1000 for rank in path)
    }
    if not paths or len(paths) != len(tree) or () in paths:
        raise InvalidSettingError(
            "tree must be a list of different rank paths, each a list of whole numbers such as [0, 1]."
        )
    orphans = [list(path) for path in sorted(paths) if len(path) > 1 and path[:-1] not in paths]
    if orphans:
        raise InvalidSettingError(f"tree holds {orphans[0]} but not the path above it, {orphans[0][:-1]}.")


class DraftHeads(Protocol):
    """What the drafter asks of heads and the model they are bound to (`heads.find_heads`).

    Shapes: k places, d hidden size, H heads, V_d tokens that can be drafted, V vocabulary.
    """

    @property
    def num_heads(self) -> int:
        """H: a draft is at most so deep."""
        ...

    @property
    def is_sequential(self) -> bool:
        """Whether a head sees the token drafted before it."""
        ...

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state `[k, d]` that the heads start from, given last hidden states `[k, d]`."""
        ...

    def step(self, head: int, state: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The state `[k, d]` of a head."""
        ...

    def all_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states `[H, k, d]` of independent heads."""
        ...

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """Scores `[k, V_d]` of a head."""
        ...

    def all_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores `[H, k, V_d]` of all heads."""
        ...

    def tokens(self, outputs: torch.Tensor) -> torch.Tensor:
        """The tokens that outputs of the heads stand for."""
        ...

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[k, V_d]` as scores `[k, V]`."""
        ...


class MedusaDrafter(Drafter):
    """Drafts with heads beside the target's LM head.

    Args:
        heads: the heads and the model they are for (`heads.find_heads`).
        config: settings.

    Raises:
        InvalidSettingError: a static tree is deeper than there are heads.
    """

    hidden = HiddenRequest(layers=(LAST_HIDDEN,))

    def __init__(self, heads: DraftHeads, config: MedusaModeConfig | None = None) -> None:
        self.heads, self.config = heads, config or MedusaModeConfig()
        self._static = None if self.config.tree is None else {tuple(path) for path in self.config.tree}
        self._lookup: PromptLookupDrafter | None = None
        # per row, the hidden state [d] that gave the last committed token
        self._states: list[torch.Tensor | None] = []
        deepest = 0 if self._static is None else max(map(len, self._static))
        if deepest > heads.num_heads:
            raise InvalidSettingError(
                f"tree is {deepest} deep, but there are only {heads.num_heads} heads to draft with."
            )

    def start(self, context: Context) -> None:
        self._states = [None] * context.batch_size
        if self.config.prompt_lookup and self._static is None:
            self._lookup = PromptLookupDrafter()
            self._lookup.start(context)
            self.drafts_for_free = True

    def attach(self, target: CachedModel, prompt: Scores) -> None:
        self._states = list(prompt.hidden[LAST_HIDDEN][:, -1])

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        hidden = scores.hidden[LAST_HIDDEN]
        for place, row in enumerate(scores.rows):
            if verdict.kept[row]:
                self._states[row] = hidden[place, verdict.kept[row][-1]]

    def propose(self, context: Context, budget: Budget) -> Draft:
        trees = [TreeBuilder(root) for root in context.roots]
        if not budget.free_only:
            self._grow(trees, context, budget)
        if self._lookup is not None:
            for tree, found in zip(trees, self._lookup.trees(context, budget), strict=True):
                tree.merge(found)
        if self._static is None:
            trees = [tree.best(budget.nodes) for tree in trees]
        draft = Draft.of(trees)
        return draft if budget.trees else draft.best_chain()

    @torch.no_grad()
    def _grow(self, trees: list[TreeBuilder], context: Context, budget: Budget) -> None:
        """Put what the heads draft into the trees."""
        depth = [min(depth, self.heads.num_heads) for depth in budget.depth]
        rows = [row for row, state in enumerate(self._states) if self._drafts(row, depth, context, state)]
        if budget.nodes < 1 or not rows:
            return
        scorer = self._scorer(context, rows)
        frontier = [_Place(row, 0) for row in rows]
        for level in range(max(depth[row] for row in rows)):
            frontier = [place for place in frontier if depth[place.row] > level]
            if not frontier:
                break
            added = self._add_level(trees, context, scorer, level, frontier, budget)
            frontier = [
                place
                for row in rows
                for place in self._promising(trees[row], [at for at in added if at.row == row], budget)
            ]
            if self._static is None and not budget.pays([trees[row].best_path() for row in rows]):
                break
        if self._static is None:
            for row in rows:  # not all of them shall compete with what else is put into the tree
                trees[row] = trees[row].best(budget.nodes)

    @staticmethod
    def _drafts(row: int, depth: Sequence[int], context: Context, state: torch.Tensor | None) -> bool:
        return depth[row] > 0 and not context.finished[row] and state is not None

    def _scorer(self, context: Context, rows: Sequence[int]) -> _Scorer:
        hidden = torch.stack([state for row in rows if (state := self._states[row]) is not None])
        if self.heads.is_sequential:
            return _Sequential(self.heads, hidden, [context.roots[row] for row in rows])
        return _Independent(self.heads, hidden, rows)

    def _add_level(
        self,
        trees: Sequence[TreeBuilder],
        context: Context,
        scorer: _Scorer,
        level: int,
        frontier: Sequence[_Place],
        budget: Budget,
    ) -> list[_Place]:
        """Put the best tokens below every place; those of a static tree only if they are in it. The new places."""
        children = min(self.config.max_children, budget.nodes) if budget.trees else 1
        if self._static is not None:
            children = 1 + max(rank for path in self._static for rank in path)
        tokens, confidence = self._candidates(trees, context, scorer, level, frontier, children)
        added = []
        for index, place in enumerate(frontier):
            for rank, (token, value) in enumerate(zip(tokens[index], confidence[index], strict=True)):
                ranks = (*place.ranks, rank)
                if self._static is not None and ranks not in self._static:
                    continue
                if value <= 0.0 and self._static is None:
                    break  # the target's processors rule it out
                node = trees[place.row].add(place.node, token, value)
                added.append(_Place(place.row, node, index, ranks))
        return added

    def _promising(self, tree: TreeBuilder, added: list[_Place], budget: Budget) -> list[_Place]:
        """The newest places of a row that are worth going on from."""
        if self._static is not None:
            return [place for place in added if any(path[:-1] == place.ranks for path in self._static)]
        if not budget.trees:
            return added[:1]
        probable = nlargest(budget.nodes, tree.reached[1:])
        least = probable[-1] if len(probable) == budget.nodes else 0.0
        beam = max(_BEAM, budget.nodes // _NODES_A_BEAM)
        worthy = [place for place in added if tree.reached[place.node] >= least]
        return nlargest(beam, worthy, key=lambda place: tree.reached[place.node])

    def _candidates(
        self,
        trees: Sequence[TreeBuilder],
        context: Context,
        scorer: _Scorer,
        level: int,
        frontier: Sequence[_Place],
        count: int,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """For every place the `count` best tokens below it, the best first, and the heads' probabilities of them."""
        paths = [trees[place.row].path(place.node) for place in frontier]
        logits = scorer.logits(level, frontier, [path[-1] if path else None for path in paths])
        sampling = self.config.draft_sampling
        # where nothing else is looked at, the tokens that can be drafted are enough
        narrow = context.takes_logits_as_they_are(sampling)
        picks = context.pick(
            logits if narrow else self.heads.spread(logits),
            [place.row for place in frontier],
            paths,
            count=count,
            sampling=sampling,
        )
        tokens = self.heads.tokens(picks.tokens) if narrow else picks.tokens
        return tokens.tolist(), picks.confidence.tolist()


def build(request: Request, config: Any) -> MedusaDrafter:
    """The drafter of mode `medusa`. Raises `AdapterError` where the model has no heads."""
    from ..heads import find_heads

    return MedusaDrafter(find_heads(request.model, config.adapter, mode="medusa"), config)


@dataclass(frozen=True)
class _Place:
    """A node that a level goes on from."""

    row: int
    node: int
    # index of its parent among the places of the level before
    parent: int = 0
    # the rank of each token on its path among its siblings
    ranks: tuple[int, ...] = ()


class _Scorer(Protocol):
    """The heads' scores, level by level."""

    def logits(self, level: int, places: Sequence[_Place], tokens: Sequence[int | None]) -> torch.Tensor:
        """Scores `[f, V_d]` of the tokens below each place; `tokens` stand there, None for the roots."""
        ...


class _Independent:
    """Heads that see the hidden state alone: the same scores wherever in a row's level."""

    def __init__(self, heads: DraftHeads, hidden: torch.Tensor, rows: Sequence[int]) -> None:
        self._index = {row: index for index, row in enumerate(rows)}
        self._logits = heads.all_logits(heads.all_states(hidden))

    def logits(self, level: int, places: Sequence[_Place], tokens: Sequence[int | None]) -> torch.Tensor:
        return self._logits[level, [self._index[place.row] for place in places]]


class _Sequential:
    """Heads that go on from the head before and the token drafted there."""

    def __init__(self, heads: DraftHeads, hidden: torch.Tensor, roots: list[int]) -> None:
        self._heads = heads
        self._states = heads.start(hidden)
        self._roots = roots

    def logits(self, level: int, places: Sequence[_Place], tokens: Sequence[int | None]) -> torch.Tensor:
        if level:
            self._states = self._states[[place.parent for place in places]]
            self._roots = [token for token in tokens if token is not None]
        ids = torch.tensor(self._roots, device=self._states.device)
        self._states = self._heads.step(level, self._states, ids)
        return self._heads.logits(level, self._states)
