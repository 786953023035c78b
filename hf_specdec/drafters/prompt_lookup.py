"""`prompt_lookup`: what followed the current suffix earlier in the text follows it again.

The suffixes of the text are looked up in the text itself, prompt and output. Every earlier occurrence votes for the
token that followed it, with a weight that grows with the length of the match, so that the longest matches decide and
frequency breaks their ties; the tree follows the most probable votes first and ends where the evidence does.

References: prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), SuffixDecoding
(arXiv:2411.04975).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import SpeculativeConfig, check_range
from ..context import Context
from ..draft import Budget, Draft
from ..drafter import Drafter
from ..modes import Request
from ..tree import TreeBuilder
from .votes import grow

_LEAST_PROBABILITY = 0.04
_MOST_OCCURRENCES = 48
_MOST_BRANCHES = 2


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(SpeculativeConfig):
    """Settings of `prompt_lookup`.

    Args:
        min_match_length: shortest suffix of the text that is looked up in it.
        max_match_length: longest suffix whose length still tells matches apart.
    """

    min_match_length: int = 1
    max_match_length: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "min_match_length", 1)
        check_range(self, "max_match_length", self.min_match_length)


class PromptLookupDrafter(Drafter):
    """Drafts by suffix matching within each row's own text."""

    def __init__(self, config: PromptLookupConfig | None = None) -> None:
        self.config = config or PromptLookupConfig()
        self._indexes: list[SuffixIndex] = []

    def start(self, context: Context) -> None:
        self._indexes = [
            SuffixIndex(self.config.min_match_length, self.config.max_match_length) for _ in context.tokens
        ]

    def propose(self, context: Context, budget: Budget) -> Draft:
        return Draft.of(self.trees(context, budget))

    def trees(self, context: Context, budget: Budget) -> list[TreeBuilder]:
        """What followed each row's suffix earlier, for drafters that put more into the same trees."""
        trees = []
        for index, text, depth in zip(self._indexes, context.tokens, budget.depth, strict=True):
            index.extend(text)
            tree = TreeBuilder(text[-1])
            if depth > 0:
                index.grow(tree, depth, budget.nodes, _MOST_BRANCHES if budget.trees else 1)
            trees.append(tree)
        return trees


def build(request: Request, config: Any) -> PromptLookupDrafter:
    """The drafter of mode `prompt_lookup`."""
    return PromptLookupDrafter(config)


class SuffixIndex:
    """Where each n-gram of a growing text occurs, for a few n: any longer match is found through a shorter one."""

    def __init__(self, min_length: int, max_length: int) -> None:
        self.max_length = max_length
        lengths = {min_length, max_length}
        n = min_length
        while n < max_length:
            lengths.add(n)
            n *= 2
        self._lengths = sorted(lengths, reverse=True)
        self._after: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions of the tokens after it
        self.text: list[int] = []

    def extend(self, text: list[int]) -> None:
        """Take in what `text` holds beyond what is known already."""
        known = self.text
        for position in range(len(known), len(text)):
            known.append(text[position])
            for n in self._lengths:
                if n <= position + 1:
                    gram = tuple(known[position + 1 - n : position + 1])
                    self._after.setdefault(gram, []).append(position + 1)

    def matches(self) -> list[tuple[int, int]]:
        """(position after an earlier occurrence of the suffix, length of the match), the latest ones first."""
        end = len(self.text)
        for n in self._lengths:
            if n > end:
                continue
            found = self._after.get(tuple(self.text[end - n :]), ())
            if len(found) > 1:  # the suffix itself is the last
                earlier = found[-2 : -2 - _MOST_OCCURRENCES : -1]
                return [(position, self._match_length(position, n)) for position in earlier]
        return []

    def _match_length(self, position: int, known: int) -> int:
        text, end, length = self.text, len(self.text), known
        while length < self.max_length and length < position and text[position - 1 - length] == text[end - 1 - length]:
            length += 1
        return length

    def grow(self, tree: TreeBuilder, depth: int, nodes: int, branches: int) -> None:
        """Draft what followed earlier occurrences of the suffix, best first.

        Args:
            tree: that holds only the root.
            depth: deepest node.
            nodes: most nodes besides the root.
            branches: most children of a node.
        """
        text, end = self.text, len(self.text)

        def token_of(position: int, drafted: tuple[int, ...]) -> int:
            source = position + len(drafted)
            # an occurrence may run into the text being drafted: repetition repeats itself
            return text[source] if source < end else drafted[source - end]

        grow(
            tree,
            self.matches(),
            token_of,
            depth=depth,
            nodes=nodes,
            branches=branches,
            least_probability=_LEAST_PROBABILITY,
        )
