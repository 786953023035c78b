"""The values of a round: what may be drafted, what is, what the target says of it, and what comes of it.

Shapes: B rows of the batch, n nodes of the widest tree, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from . import tree
from .errors import ConfigurationError, DraftError

# what the LM head is given, among the numbers of layers in a `HiddenRequest`
LAST_HIDDEN = -1


@dataclass(frozen=True)
class HiddenRequest:
    """Which hidden states of the target a drafter reads. They come with the scores (`Scores.hidden`).

    Layers are counted as in transformers' `hidden_states`: 0 is what enters the first layer, i what leaves i layers
    (before the final norm), and `LAST_HIDDEN` what the LM head is given.
    """

    # read in every round, at every node of the draft
    layers: tuple[int, ...] = ()
    # read in the forward over the prompts; None reads the same layers there
    prompt_layers: tuple[int, ...] | None = None
    # positions of the prompts, counted from their ends; None reads all of them
    prompt_positions: tuple[int, ...] | None = (-1,)

    def __post_init__(self) -> None:
        entries = {
            "layers": self.layers,
            "prompt_layers": self.prompt_layers,
            "prompt_positions": self.prompt_positions,
        }
        for name, entry in entries.items():
            if entry is None and name != "layers":
                continue
            if not isinstance(entry, tuple) or not all(type(value) is int for value in entry):
                raise ConfigurationError(f"{name} of a HiddenRequest must be a tuple of whole numbers, got {entry!r}.")
        if any(position >= 0 for position in self.prompt_positions or ()):
            raise ConfigurationError(
                f"prompt_positions of a HiddenRequest count from the end, so they are negative; got "
                f"{self.prompt_positions}."
            )

    @property
    def of_prompt(self) -> tuple[int, ...]:
        """The layers that are read in the forward over the prompts."""
        return self.layers if self.prompt_layers is None else self.prompt_layers


class Pays(Protocol):
    """Whether one more drafted token is worth its cost (see `control.Controller`)."""

    def __call__(self, chains: Sequence[Sequence[float]]) -> bool:
        """`chains[b]`: confidences of the tokens drafted so far in each running row."""
        ...


@dataclass(frozen=True)
class Budget:
    """How much a drafter may propose this round."""

    # per row: deepest node that may be proposed; 0 asks for no draft
    depth: list[int]
    # per row: deepest node that has a position and could still be committed; passengers may use it all
    room: list[int]
    # most nodes a row's tree may have besides its root
    nodes: int
    # whether branching drafts are of use; otherwise only the best chain is verified
    trees: bool
    # for drafters that pay per token: draft one more?
    pays: Pays
    # plain steps that a forward over so many nodes per row takes here; None where costs are not measured
    cost: Callable[[int], float] | None = None
    # only what costs next to nothing to draft is asked for: the rest has not paid lately
    free_only: bool = False


@dataclass(frozen=True)
class Draft:
    """A token tree per row, made by `of`, `chains` or `empty`. A chain is a tree; rows may differ in shape and size."""

    # [B, n]; node 0 is the root, the last committed token
    tokens: list[list[int]]
    # [B, n]; parents[b][0] == -1, parents[b][i] < i
    parents: list[list[int]]
    # [B, n]: the drafter's own estimate that a node is accepted once its parent is, in [0, 1]
    confidence: list[list[float]] | None = None
    # [B, n, V_q]: the distribution each node was drawn from, None for deterministic drafts (point mass)
    q: torch.Tensor | None = None
    # [B, n]: nodes that are scored but can never be accepted
    passenger: list[list[bool]] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise DraftError(f"{len(self.tokens)} rows of tokens but {len(self.parents)} rows of parents")
        for name in ("parents", "confidence", "passenger"):
            rows = getattr(self, name)
            if rows is not None and [len(row) for row in rows] != [len(row) for row in self.tokens]:
                raise DraftError(f"`{name}` and `tokens` of a draft differ in shape")
        for parents in self.parents:
            tree.check(parents)

    @classmethod
    def empty(cls, roots: Sequence[int]) -> Draft:
        """No draft at all: the round is one plain step."""
        return cls(tokens=[[root] for root in roots], parents=[[-1] for _ in roots])

    @classmethod
    def chains(
        cls,
        roots: Sequence[int],
        continuations: Sequence[Sequence[int]],
        confidence: Sequence[Sequence[float]] | None = None,
        q: torch.Tensor | None = None,
    ) -> Draft:
        """One chain per row: `continuations[b]` follows `roots[b]`."""
        return cls(
            tokens=[[root, *chain] for root, chain in zip(roots, continuations, strict=True)],
            parents=[list(range(-1, len(chain))) for chain in continuations],
            confidence=None if confidence is None else [[1.0, *row] for row in confidence],
            q=q,
        )

    @classmethod
    def of(cls, trees: Sequence[tree.TreeBuilder], q: torch.Tensor | None = None) -> Draft:
        """The draft of these trees, one per row."""
        rides = any(any(row.passenger) for row in trees)
        return cls(
            tokens=[row.tokens for row in trees],
            parents=[row.parents for row in trees],
            confidence=[row.confidence for row in trees],
            q=q,
            passenger=[row.passenger for row in trees] if rides else None,
        )

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def width(self) -> int:
        """Nodes of the widest row, the root included: the tokens per row of a forward over this draft."""
        return max(len(row) for row in self.tokens)

    @property
    def is_empty(self) -> bool:
        return self.width == 1

    @cached_property
    def is_chain(self) -> bool:
        return all(tree.is_chain(parents) for parents in self.parents)

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """Children that may be accepted, per row and node."""
        below = [tree.children(parents) for parents in self.parents]
        if self.passenger is not None:
            for row, riders in zip(below, self.passenger, strict=True):
                for node in range(len(row)):
                    row[node] = [child for child in row[node] if not riders[child]]
        return below

    @cached_property
    def drafted(self) -> list[list[int]]:
        """Nodes that may be accepted, per row: all but the root and the passengers."""
        if self.passenger is None:
            return [list(range(1, len(row))) for row in self.tokens]
        return [[node for node in range(1, len(row)) if not row[node]] for row in self.passenger]

    def keep(self, nodes: Sequence[Sequence[int]]) -> Draft:
        """The draft that holds only `nodes[b]` (ascending, root first, closed under parents) of each row."""
        if all(len(kept) == len(row) for kept, row in zip(nodes, self.tokens, strict=True)):
            return self

        def pick(rows: list[list]) -> list[list]:
            return [[row[node] for node in kept] for row, kept in zip(rows, nodes, strict=True)]

        q = None
        if self.q is not None:
            width = max(len(kept) for kept in nodes)
            index = torch.tensor([list(kept) + [0] * (width - len(kept)) for kept in nodes], device=self.q.device)
            q = self.q.gather(1, index[..., None].expand(-1, -1, self.q.shape[-1]))
        return Draft(
            tokens=pick(self.tokens),
            parents=[tree.subtree(row, kept) for row, kept in zip(self.parents, nodes, strict=True)],
            confidence=None if self.confidence is None else pick(self.confidence),
            q=q,
            passenger=None if self.passenger is None else pick(self.passenger),
        )

    def within(self, rooms: Sequence[int]) -> Draft:
        """The draft without nodes deeper than each row's room: they could not be committed, nor have a position."""
        if self.width - 1 <= min(rooms):
            return self
        return self.keep(
            [
                [node for node, depth in enumerate(tree.depths(parents)) if depth <= max(room, 0)]
                for parents, room in zip(self.parents, rooms, strict=True)
            ]
        )

    def known_to(self, vocab_size: int) -> Draft:
        """The draft without tokens outside this vocabulary, and what follows them."""
        nodes = []
        for tokens, parents in zip(self.tokens, self.parents, strict=True):
            kept: list[int] = []
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if node == 0 or (token < vocab_size and parent in kept):
                    kept.append(node)
            nodes.append(kept)
        return self.keep(nodes)

    def best_chain(self) -> Draft:
        """The most probable path of every row, for models that cannot take trees."""
        if self.is_chain:
            return self
        nodes = []
        for row, parents in enumerate(self.parents):
            confidence = self.confidence[row] if self.confidence is not None else [1.0] * len(parents)
            chain, below = [0], self.children[row]
            while below[chain[-1]]:
                chain.append(max(below[chain[-1]], key=lambda node: (confidence[node], -node)))
            nodes.append(chain)
        return self.keep(nodes)


def check_draft(draft: Draft, roots: Sequence[int], vocab_size: int) -> None:
    """Raise `DraftError` unless this is a draft for these roots: drafters are open to users, and the target is not."""
    if not isinstance(draft, Draft):
        raise DraftError(f"propose must return a Draft, got {type(draft).__name__}")
    if draft.batch_size != len(roots):
        raise DraftError(f"the draft has {draft.batch_size} rows, the batch has {len(roots)}")
    for row, root in enumerate(roots):
        tokens = draft.tokens[row]
        if not all(type(token) is int for token in (*tokens, *draft.parents[row])):
            raise DraftError(f"tokens and parents of row {row} of the draft must be whole numbers")
        if tokens[0] != root:
            raise DraftError(
                f"row {row} of the draft starts with {tokens[0]}, not with the last committed token {root}"
            )
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise DraftError(f"row {row} of the draft holds a token outside the vocabulary of {vocab_size}")
        riders = draft.passenger[row] if draft.passenger is not None else [False] * len(tokens)
        if any(riders[parent] and not rides for parent, rides in zip(draft.parents[row][1:], riders[1:], strict=True)):
            raise DraftError(f"row {row} of the draft has a node that may be accepted below one that may not")
        confidence = draft.confidence[row] if draft.confidence is not None else []
        if not all(isinstance(value, (int, float)) and 0.0 <= value <= 1.0 for value in confidence):
            raise DraftError(f"confidences of row {row} of the draft must lie between 0 and 1")
    if draft.q is not None:
        q = draft.q
        if (
            not isinstance(q, torch.Tensor)
            or q.dim() != 3
            or q.shape[0] != draft.batch_size
            or q.shape[1] < draft.width
        ):
            raise DraftError(f"q of the draft must be a tensor [{draft.batch_size}, {draft.width}, V]")
        if max(max(tokens[1:], default=0) for tokens in draft.tokens) >= q.shape[2]:
            raise DraftError(f"the draft holds a token that its q, over {q.shape[2]} tokens, does not know")
        if not bool(torch.isfinite(q).all()):
            raise DraftError("q of the draft holds values that are not finite")


@dataclass(frozen=True)
class AttentionLayout:
    """Where the keys of a forward over drafts lie in its attentions."""

    # slots that the KV cache held before the forward
    slots_before: int
    # whether keys fill a static cache
    static: bool
    # per layer: keys that a plain step of a sliding window sees; None where it sees all
    windows: tuple[int | None, ...]


@dataclass(frozen=True)
class Scores:
    """What the target says about the drafts of the rows it still carries: k of them, finished ones may be gone."""

    # [k, n, V]
    logits: torch.Tensor
    # [k]: which row of the batch each is
    rows: list[int]
    # layer -> [k, n, d], the hidden states that the drafter asked for (`Drafter.hidden`)
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    # per layer [k, n, d] and [k, heads, n, keys], where the user asked for them
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    # per layer [B, heads, n, keys of the encoder's output], where there is an encoder
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    # how the keys of `attentions` lie; None for the prompts' forward, whose outputs are returned whole
    layout: AttentionLayout | None = None


@dataclass(frozen=True)
class Verdict:
    """What came of a draft. Every row commits its accepted path and one more token (recovered or bonus)."""

    # per row: the nodes whose keys stay in the cache, root first; the last committed token is the next root
    kept: list[list[int]]
    # per row: the tokens committed this round; none for rows that were finished before it
    committed: list[list[int]]
    # per row: how many of them the draft held
    accepted: list[int]
