"""A tree of what followed before: earlier continuations vote for the next token, the longest matches decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from ..tree import TreeBuilder

Source = TypeVar("Source")

# Prior acceptance of the token after a match of so many tokens; the controller corrects it by what it sees
_TRUST = (0.0, 0.15, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8)
_TRUST_LONG = 0.9


def grow(
    tree: TreeBuilder,
    voters: Sequence[tuple[Source, int]],
    token_of: Callable[[Source, tuple[int, ...]], int | None],
    *,
    depth: int,
    nodes: int,
    branches: int,
    least_probability: float = 0.0,
) -> None:
    """Grow a tree best first.

    Every voter votes for the token that followed it, with a weight that grows with the length of its match, so that
    the longest matches decide and frequency breaks their ties.

    Args:
        tree: that holds only the root.
        voters: (source, length of its match with the end of the text), the preferred ones first.
        token_of: the token that a source goes on with after these drafted ones; None where it ends.
        depth: deepest node.
        nodes: most nodes besides the root.
        branches: most children of a node.
        least_probability: of a path that is still followed.
    """
    # a frontier entry: (-path probability, node, tokens drafted on its path, voters that agree with it)
    frontier: list[tuple[float, int, tuple[int, ...], Sequence[tuple[Source, int]]]] = [(-1.0, 0, (), voters)]
    while frontier and len(tree) <= nodes:
        reached, node, drafted, agreeing = heappop(frontier)
        if len(drafted) >= depth:
            continue
        for token, share, behind, length in _votes(agreeing, token_of, drafted)[:branches]:
            confidence = share * _trust(length + len(drafted))
            if -reached * confidence < least_probability or len(tree) > nodes:
                break
            child = tree.add(node, token, confidence)
            heappush(frontier, (reached * confidence, child, (*drafted, token), behind))


def _votes(
    voters: Sequence[tuple[Source, int]],
    token_of: Callable[[Source, tuple[int, ...]], int | None],
    drafted: tuple[int, ...],
) -> list[tuple[int, float, list[tuple[Source, int]], int]]:
    """(token, share of the votes, voters behind it, their longest match), the largest share first."""
    by_token: dict[int, list[tuple[Source, int]]] = {}
    for source, length in voters:
        token = token_of(source, drafted)
        if token is not None:
            by_token.setdefault(token, []).append((source, length))
    if len(by_token) == 1:
        ((token, behind),) = by_token.items()
        return [(token, 1.0, behind, max(length for _, length in behind))]
    weights = {token: sum(4.0**length for _, length in behind) for token, behind in by_token.items()}
    total = sum(weights.values())
    ranked = sorted(by_token, key=lambda token: -weights[token])  # stable: the preferred voter wins ties
    return [
        (token, weights[token] / total, by_token[token], max(length for _, length in by_token[token]))
        for token in ranked
    ]


def _trust(length: int) -> float:
    return _TRUST[length] if length < len(_TRUST) else _TRUST_LONG
