"""The values that pass between the rooms: Context, Budget, Draft, Scores, Verdict.

Shapes: B rows of the batch, n nodes of the widest tree, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from . import tree
from .errors import DraftError

if TYPE_CHECKING:
    from .sampling import NoiseTape, Selection


@dataclass
class Context:
    """What has been committed so far, as the drafters may see it. Only the loop writes it."""

    # per row: the prompt without its padding, then every committed token
    tokens: list[list[int]]
    # per row: how many of `tokens` are prompt
    prompt_lengths: list[int]
    # per row: nothing more will be committed
    finished: list[bool]
    # where drafts on the accelerator should live
    device: torch.device
    # how the target turns logits into tokens; pure parts may be replayed on drafts
    selection: Selection
    # [B, P]: the prompts as the processors see them, with their padding
    padded_prompts: torch.Tensor
    # what the LM head was given where it scored the last committed tokens, for drafters with `needs_hidden`: [B, d]
    hidden: torch.Tensor | None = None

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def roots(self) -> list[int]:
        """Last committed token of every row, whose keys are not cached yet."""
        return [row[-1] for row in self.tokens]

    def step(self, row: int) -> int:
        """Number of tokens generated so far in `row`."""
        return len(self.tokens[row]) - self.prompt_lengths[row]

    def input_ids(self, row: int, drafted: Sequence[int] = ()) -> torch.Tensor:
        """`[1, T]`: what the processors would see in `row` after these drafted tokens."""
        prompt = self.padded_prompts[row : row + 1]
        generated = [*self.tokens[row][self.prompt_lengths[row] :], *drafted]
        return torch.cat([prompt, prompt.new_tensor([generated])], dim=1) if generated else prompt

    def probabilities(
        self, logits: torch.Tensor, rows: Sequence[int], drafted: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """What the target would sample from, were these its logits: after its processors, where they may be replayed.

        Args:
            logits: `[k, V]`, of a drafter or of the target.
            rows: which row of the batch each belongs to.
            drafted: what was drafted in that row before it.

        Returns:
            probabilities `[k, V]`.
        """
        selection, logits = self.selection, logits.to(self.device, torch.float32)
        if not selection.processors or not selection.is_row_wise:
            return logits.softmax(-1)
        if selection.is_context_free:
            return selection.process(self.padded_prompts, logits, None).softmax(-1)
        scores = [
            selection.process(self.input_ids(row, path), logits[i : i + 1], [row])
            for i, (row, path) in enumerate(zip(rows, drafted, strict=True))
        ]
        return torch.cat(scores).softmax(-1)

    def coupled(self, probabilities: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
        """Probabilities `[k, V]` over the noise of the target's sampling: their argmax is its likeliest pick.

        Unchanged where the target is greedy, the tape may not be read ahead, or the step is over.

        Args:
            probabilities: `[k, V]`; V may fall short of the target's vocabulary.
            rows: which row of the batch each belongs to.
            steps: which generated token of that row each is about.
        """
        tape = self.tape
        if tape is None:
            return probabilities
        noise = [
            tape.noise(step)[row, : probabilities.shape[1]]
            if step >= self.step(row) and not self.finished[row]
            else torch.ones_like(probabilities[0])
            for row, step in zip(rows, steps, strict=True)
        ]
        return probabilities / torch.stack(noise)

    @property
    def draws_own_noise(self) -> bool:
        """Whether the acceptance rule compares distributions, so that drafts must be drawn from q."""
        return self.selection.do_sample and self.selection.tape is None

    @property
    def tape(self) -> NoiseTape | None:
        """The noise that sampling will use, or None where reading it ahead is not allowed."""
        return self.selection.readable_tape


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
    # plain steps that a forward over so many nodes a row takes here; None where nobody measures
    cost: Callable[[int], float] | None = None
    # only what costs next to nothing to draft is asked for: the rest has not paid lately
    free_only: bool = False


@dataclass(frozen=True)
class Draft:
    """A token tree per row. A chain is a tree; rows may differ in shape and size."""

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
        """One chain a row: `continuations[b]` follows `roots[b]`."""
        return cls(
            tokens=[[root, *chain] for root, chain in zip(roots, continuations, strict=True)],
            parents=[list(range(-1, len(chain))) for chain in continuations],
            confidence=None if confidence is None else [[1.0, *row] for row in confidence],
            q=q,
        )

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def width(self) -> int:
        """Nodes of the widest row, the root included: the tokens a forward over this draft processes a row."""
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

    def joined(self, other: Draft, nodes: int) -> Draft:
        """The best `nodes` drafted nodes a row of this draft and another one for the same roots, in one tree.

        Both have confidences, neither has q or passengers. They are taken to err independently: a node that both
        hold, with confidences a and b, gets 1 - (1 - a)(1 - b).
        """
        assert self.confidence is not None
        assert other.confidence is not None
        rows = [
            tree.union(*both)
            for both in zip(
                zip(self.tokens, self.parents, self.confidence, strict=True),
                zip(other.tokens, other.parents, other.confidence, strict=True),
                strict=True,
            )
        ]
        tokens, parents, confidence = (list(part) for part in zip(*rows, strict=True))
        whole = Draft(tokens=tokens, parents=parents, confidence=confidence)
        return whole.keep([sorted(tree.best_first(parents, values)[: nodes + 1]) for _, parents, values in rows])

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
class Scores:
    """What the target says about the drafts of the rows it still carries: k of them, finished ones may be gone."""

    # [k, n, V]
    logits: torch.Tensor
    # [k]: which row of the batch each is
    rows: list[int]
    # [k, n, d], what the LM head was given, where the drafter declares `needs_hidden`
    hidden: torch.Tensor | None = None
    # per layer [k, n, d] and [k, heads, n, keys], where the user asked for them
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """What came of a draft. Every row commits its accepted path and one more token (recovered or bonus)."""

    # per row: the nodes whose keys stay in the cache, root first; the last committed token is the next root
    kept: list[list[int]]
    # per row: the tokens committed this round; none for rows that were finished before it
    committed: list[list[int]]
    # per row: how many of them the draft held
    accepted: list[int]
