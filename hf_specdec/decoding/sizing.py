"""Parts of a draft: its first nodes, its most confident ones, with the passengers that fit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .. import tree
from ..draft import Draft


def first_nodes(draft: Draft, running: Sequence[bool], nodes: int) -> Draft:
    """The first `nodes` drafted nodes of every running row: a cut that does not depend on what was drawn."""
    return draft.keep(
        [
            list(range(min(nodes + 1, len(tokens)))) if runs else [0]
            for tokens, runs in zip(draft.tokens, running, strict=True)
        ]
    )


def most_confident(draft: Draft, row: int, nodes: int) -> list[int]:
    """The best `nodes` drafted nodes of a row by the drafter's own confidence, the root and the passengers."""
    confidence = draft.confidence[row] if draft.confidence is not None else [1.0] * len(draft.tokens[row])
    drafted = set(draft.drafted[row])
    best = [node for node in tree.best_first(draft.parents[row], confidence) if node in drafted]
    return with_passengers(draft, row, best[:nodes])


def with_passengers(draft: Draft, row: int, nodes: Sequence[int]) -> list[int]:
    """These nodes of a row, the root and all passengers, in order."""
    riding = [] if draft.passenger is None else [node for node, rides in enumerate(draft.passenger[row]) if rides]
    return sorted({0, *nodes, *riding})


def count_passengers(draft: Draft) -> int:
    """Passengers of the row that has the most."""
    return max(map(sum, draft.passenger)) if draft.passenger is not None else 0


def drop_excess_passengers(draft: Draft, most_nodes: int) -> Draft:
    """The draft, without its passengers where they do not fit."""
    if count_passengers(draft) <= most_nodes:
        return draft
    return draft.keep([[0, *drafted] for drafted in draft.drafted])
