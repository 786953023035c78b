"""`lookahead`: the target guesses n-grams of its own future in a Jacobi window, and verifies them when they come up.

A window of W columns and N - 1 levels rides along in every target forward as passenger nodes. The token of level l and
column i is a guess at the token l + i places after the root; it is scored behind level 0 up to column i and its own
column below it, which makes the window a token tree:

    root --- a1 --- a2         level 0, a chain that starts at the root
     |       |      |
     b0      b1     b2         level 1
     |       |      |
     c0      c1     c2         level 2, the last one for N = 4

The target's tokens after the last level complete one n-gram per column and become the new last level, while level 0
leaves. The n-grams go into a pool, and so does every n-gram of the prompt and of the output. The pool's continuations
of the current token are drafted as one tree. When the target samples, the window reads the noise tape, so its guesses
are those that the target would draw there.

Reference: lookahead decoding (arXiv:2402.02057).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import tree
from ..config import SpeculativeConfig, check_range
from ..context import Context
from ..draft import Budget, Draft, Scores, Verdict
from ..drafter import Drafter
from ..modes import Request
from ..tree import TreeBuilder
from .votes import grow

# tokens before an n-gram that tell how well it fits
_MOST_CONTEXT = 8
_LEAST_PROBABILITY = 0.02
# width of the window where nobody measures what it costs
_DEFAULT_WINDOW = 5
# widths that "auto" chooses from
_WINDOWS = (3, 5, 7, 10, 15, 20)


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig(SpeculativeConfig):
    """Settings of `lookahead`. The window adds (ngram_size - 1) * window_size - 1 nodes to every forward.

    Args:
        window_size: W, columns of the Jacobi window; 0 leaves it out, so that n-grams come from the text alone.
            `"auto"` takes what the measured cost of a forward allows, which may be none.
        ngram_size: N; n-grams hold N tokens, so a draft is at most N - 1 deep.
        guess_set_size: G, most n-grams kept, and drafted at once, for a first token.
    """

    window_size: int | Literal["auto"] = "auto"
    ngram_size: int = 5
    guess_set_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "window_size", 0)
        check_range(self, "ngram_size", 2)
        check_range(self, "guess_set_size", 1)


class LookaheadDrafter(Drafter):
    """Drafts from a pool of n-grams that a Jacobi window and the text fill."""

    def __init__(self, config: LookaheadConfig | None = None) -> None:
        self.config = config or LookaheadConfig()
        self._rows: list[_Row] = []
        self._gain = WindowGain(self.config.ngram_size)
        self._width: int | None = None

    def start(self, context: Context) -> None:
        size, most = self.config.ngram_size, self.config.guess_set_size
        self._rows = [_Row(NgramPool(size, most), Window(size, seed=row)) for row in range(context.batch_size)]
        self._gain = WindowGain(size)
        self._width = None

    def propose(self, context: Context, budget: Budget) -> Draft:
        width = self._window_width(budget)
        branches = self.config.guess_set_size if budget.trees else 1
        trees = []
        for row, state in enumerate(self._rows):
            text, grown = context.tokens[row], TreeBuilder(context.roots[row])
            state.pool.read(text)
            state.pool.grow(grown, text, budget.depth[row], budget.nodes, branches)
            if width and budget.room[row] >= width + self.config.ngram_size:  # its deepest node must have a place
                state.window.ride(grown, text, width)
            trees.append(grown)
        return Draft.of(trees)

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for index, row in enumerate(scores.rows):
            committed = verdict.committed[row]
            if not committed:
                continue
            state, text = self._rows[row], context.tokens[row]
            until_root = text[: len(text) - len(committed)]
            riding = [node for node, rides in enumerate(draft.passenger[row]) if rides] if draft.passenger else []
            if len(riding) != state.window.size:
                state.window.clear()  # what it holds is about other places by now
                continue
            accepted = committed[: verdict.accepted[row]]
            self._gain.observe(len(committed), len(accepted) - state.pool.reach_of_text(until_root[-1], accepted))
            last = state.window.last_level(riding)
            depths = tree.depths(draft.parents[row])
            steps = [context.step(row) - len(committed) + depths[node] for node in last]
            guesses = self._guesses(context, scores.logits[index, last], row, steps)
            # a draw belongs to its step, so the window keeps its places; a greedy guess does not mind (as in the paper)
            passed = 1 if context.tape is None else len(committed)
            for ngram, before in state.window.advance(until_root, guesses, passed):
                state.pool.add(ngram, before)

    @staticmethod
    def _guesses(context: Context, logits: torch.Tensor, row: int, steps: Sequence[int]) -> list[int]:
        """The target's tokens for these steps of a row, by the logits `[W, V]` of the window's last level."""
        picks = context.pick(logits, [row] * len(steps), [()] * len(steps), steps=steps)
        return picks.tokens[:, 0].tolist()

    def _window_width(self, budget: Budget) -> int:
        """Columns of the window this round: the setting, or what pays by the measured cost of a forward."""
        if self.config.window_size != "auto":
            return self.config.window_size if budget.trees else 0
        if self._width is None:
            self._width = self._gain.best_width(budget) if budget.trees else 0
        elif self._width and budget.cost is not None and not self._gain.pays(self._width, budget.cost):
            self._width = 0
        return self._width


def build(request: Request, config: Any) -> LookaheadDrafter:
    """The drafter of mode `lookahead`."""
    return LookaheadDrafter(config)


@dataclass
class _Row:
    """What is kept for a row of the batch."""

    pool: NgramPool
    window: Window


class WindowGain:
    """Tokens a round that a window's n-grams add to those of the text: expected at first, then measured."""

    PRIOR_ROUNDS = 16.0
    MEMORY = 64.0
    DRAFT = 4  # drafted nodes that ride along, for the cost of the forward

    def __init__(self, ngram_size: int) -> None:
        self.levels = ngram_size - 1
        self._rounds = self._tokens = self._gained = 0.0

    @staticmethod
    def expected(width: int) -> float:
        """Tokens a round gained by a window of this width, by what SmolLM2-135M gained (docs/choosing-a-mode.md)."""
        return 0.01 * width

    def observe(self, committed: int, gained: int) -> None:
        """A round committed so many tokens, of which the text's n-grams would not have held so many."""
        if self._rounds >= self.MEMORY:
            self._rounds, self._tokens, self._gained = self._rounds / 2, self._tokens / 2, self._gained / 2
        self._rounds += 1
        self._tokens += committed
        self._gained += gained

    def best_width(self, budget: Budget) -> int:
        """The width that promises most; 0 where none pays."""
        cost = budget.cost
        if cost is None:
            return _DEFAULT_WINDOW
        paying = [width for width in _WINDOWS if self.pays(width, cost)]
        return max(paying, key=lambda width: self._rate(width, cost), default=0)

    def pays(self, width: int, cost: Callable[[int], float]) -> bool:
        """Whether the window's n-grams are worth its share of the forward."""
        return self._rate(width, cost) > self._rate(0, cost)

    def _rate(self, width: int, cost: Callable[[int], float]) -> float:
        """Tokens per plain step, with or without the window."""
        rounds = self._rounds + self.PRIOR_ROUNDS
        gain = (self._gained + self.PRIOR_ROUNDS * self.expected(width)) / rounds
        without = (self._tokens - self._gained + self.PRIOR_ROUNDS) / rounds
        nodes = 1 + self.DRAFT
        return (without + gain) / cost(nodes + self.levels * width - 1) if width else without / cost(nodes)


class Window:
    """The Jacobi window of one row: `levels[l][i]` is a guess at the token l + i places after the root.

    (Or further on, where it moves on by less than what was committed.)

    Args:
        ngram_size: N; a full window has N - 1 levels.
        seed: of the tokens that the window starts with, which are drawn from the text.
    """

    def __init__(self, ngram_size: int, seed: int) -> None:
        self.most_levels = ngram_size - 1
        self.levels: list[list[int]] = []
        self._random = random.Random(seed)

    @property
    def size(self) -> int:
        """Nodes of the window besides the root; -1 before its first round."""
        return sum(map(len, self.levels)) - 1

    def clear(self) -> None:
        """Start anew with the next round."""
        self.levels = []

    def ride(self, grown: TreeBuilder, text: Sequence[int], width: int) -> None:
        """Put the window's nodes into a tree, as passengers.

        Args:
            grown: whose root is the last token of `text`.
            text: what has been committed.
            width: W.
        """
        if not self.levels:
            self.levels = [[]]
        for level in self.levels:
            level.extend(self._random.choice(text) for _ in range(width - len(level)))
        self.levels[0][0] = text[-1]
        above = [0]  # the nodes of level 0, a chain that starts at the root
        for token in self.levels[0][1:]:
            above.append(grown.add(above[-1], token, 0.0, passenger=True))
        for level in self.levels[1:]:
            above = [grown.add(node, token, 0.0, passenger=True) for node, token in zip(above, level, strict=True)]

    def last_level(self, riding: Sequence[int]) -> list[int]:
        """The nodes of the last level, given all of the window's nodes."""
        width = len(self.levels[0])
        return [0, *riding][-width:]

    def advance(
        self, text: Sequence[int], guesses: Sequence[int], passed: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Take in the target's tokens after the last level, and move on.

        Args:
            text: the text up to the root, as it was when the window was scored.
            guesses: the target's token after each node of the last level.
            passed: places to move on by.

        Returns:
            (n-gram, tokens before it) of every column, once the window is full.
        """
        ngrams = []
        full = len(self.levels) == self.most_levels
        if full:
            line = [*text[-1 - _MOST_CONTEXT :], *self.levels[0][1:]]
            root = len(line) - len(self.levels[0])
            for column, guess in enumerate(guesses):
                ngram = (*(level[column] for level in self.levels), guess)
                at = root + column
                ngrams.append((ngram, tuple(line[max(0, at - _MOST_CONTEXT) : at])))
            del self.levels[0]
        self.levels.append(list(guesses))
        # the level that left was one place
        gone = passed - 1 if full else passed
        self.levels = [level[gone:] for level in self.levels]
        return ngrams


@dataclass
class _Known:
    """What is known of an n-gram."""

    # the tokens before it when it was last seen
    before: tuple[int, ...]
    # whether the text holds it
    in_text: bool


class NgramPool:
    """N-grams by their first token; of each first token the `most` that were seen last."""

    def __init__(self, ngram_size: int, most: int) -> None:
        self.ngram_size, self.most = ngram_size, most
        self._by_first: dict[int, OrderedDict[tuple[int, ...], _Known]] = {}
        self._next = 0  # where the next n-gram of the text starts

    def read(self, text: Sequence[int]) -> None:
        """Take in the n-grams that `text` holds beyond those known already."""
        for start in range(self._next, len(text) - self.ngram_size + 1):
            before = tuple(text[max(0, start - _MOST_CONTEXT) : start])
            self.add(tuple(text[start : start + self.ngram_size]), before, in_text=True)
            self._next = start + 1

    def add(self, ngram: tuple[int, ...], before: tuple[int, ...], in_text: bool = False) -> None:
        """An n-gram was seen after these tokens."""
        known = self._by_first.setdefault(ngram[0], OrderedDict())
        rest = ngram[1:]
        if rest in known:
            known.move_to_end(rest)
            if known[rest].in_text and not in_text:
                return  # what the text says about its place is worth more than a guess
        known[rest] = _Known(before, in_text)
        if len(known) > self.most:
            known.popitem(last=False)

    def grow(self, grown: TreeBuilder, text: Sequence[int], depth: int, nodes: int, branches: int) -> None:
        """Draft what may follow the last token of `text`.

        Args:
            grown: a tree that holds only the root.
            text: what has been committed.
            depth: deepest node.
            nodes: most nodes besides the root.
            branches: most children of a node.
        """
        known = self._by_first.get(text[-1], OrderedDict())
        voters = [(rest, 1 + _common_end(text, entry.before)) for rest, entry in reversed(known.items())]
        grow(
            grown,
            voters,
            lambda rest, drafted: rest[len(drafted)] if len(drafted) < len(rest) else None,
            depth=depth,
            nodes=nodes,
            branches=branches,
            least_probability=_LEAST_PROBABILITY,
        )

    def reach_of_text(self, first: int, tokens: Sequence[int]) -> int:
        """How many of these tokens after `first` an n-gram of the text holds in a row."""
        reach = 0
        for rest, entry in self._by_first.get(first, {}).items():
            if entry.in_text:
                agreed = 0
                while agreed < min(len(rest), len(tokens)) and rest[agreed] == tokens[agreed]:
                    agreed += 1
                reach = max(reach, agreed)
        return reach


def _common_end(text: Sequence[int], before: Sequence[int]) -> int:
    """How many tokens before the last one of `text` are also the last ones of `before`."""
    length = 0
    while length < len(before) and length + 1 < len(text) and before[-1 - length] == text[-2 - length]:
        length += 1
    return length
