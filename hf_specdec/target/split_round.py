"""A round whose drafted nodes run through the layers below an exit one by one, before it is known which are verified.

Bookkeeping of nodes: which have run, where they stand, and whether verification can go on from them. No model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import tree
from .halves import Halves

Trees = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Missing:
    """Nodes of the trees to verify that have not run yet, counted on after those that have."""

    # per row
    tokens: list[list[int]]
    parents: list[list[int]]

    @property
    def any(self) -> bool:
        return any(self.tokens)

    @property
    def width(self) -> int:
        return max(map(len, self.tokens))


class SplitRound:
    """The nodes of a round that have run through the lower layers.

    Args:
        halves: the model in two halves.
        batch_size: B, rows of the trees.
    """

    def __init__(self, halves: Halves, batch_size: int) -> None:
        self.halves = halves
        # per row, equally many; rows that had fewer are filled with copies of their root, which nothing sees
        self.tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.parents: list[list[int]] = [[] for _ in range(batch_size)]
        # places after the root's; 0 for what rows are filled with, since there may be no place after the root's
        self.depths: list[list[int]] = [[] for _ in range(batch_size)]
        # [B, p, d]: what the lower layers made of them
        self.hidden: torch.Tensor | None = None
        # per row: (parent, token) -> node
        self._known: list[dict[tuple[int, int], int]] = [{} for _ in range(batch_size)]

    @property
    def size(self) -> int:
        """Nodes per row."""
        return len(self.tokens[0])

    def add(self, tokens: Trees, parents: Trees) -> int:
        """Take in the next nodes, rows filled up to the same number. Returns the number of the first.

        Args:
            tokens: per row, of the new nodes.
            parents: counted over the nodes of the whole round; the first nodes of a round begin with the root.
        """
        start, width = self.size, max(map(len, tokens))
        for row, (new, new_parents) in enumerate(zip(tokens, parents, strict=True)):
            for index, (token, parent) in enumerate(zip(new, new_parents, strict=True)):
                self._known[row][parent, token] = start + index
            filling = width - len(new)
            root = self.tokens[row][0] if self.tokens[row] else new[0]
            self.tokens[row] += [*new, *[root] * filling]
            self.parents[row] += [*new_parents, *[0] * filling]
            depths = tree.depths(self.parents[row])[start : start + len(new)]
            self.depths[row] += [*depths, *[0] * filling]
        return start

    def remember(self, hidden: torch.Tensor) -> None:
        """The hidden states `[B, m, d]` of the nodes that were added last."""
        self.hidden = hidden if self.hidden is None else torch.cat([self.hidden, hidden], dim=1)

    def find(self, tokens: Trees, parents: Trees) -> tuple[list[list[int]], Missing]:
        """Where each node of these trees stands among those that have run, and those that are missing.

        Missing ones are counted on, as `add` will place them.
        """
        places: list[list[int]] = []
        missing = Missing([], [])
        for known, row, row_parents in zip(self._known, tokens, parents, strict=True):
            at: list[int] = []
            new: list[int] = []
            new_parents: list[int] = []
            for token, parent in zip(row, row_parents, strict=True):
                above = -1 if parent < 0 else at[parent]
                place = known.get((above, token))
                if place is None:
                    place = self.size + len(new)
                    new.append(token)
                    new_parents.append(above)
                at.append(place)
            places.append(at)
            missing.tokens.append(new)
            missing.parents.append(new_parents)
        return places, missing

    def fits_windows(self, missing: Missing) -> bool:
        """Whether all nodes saw what they must, or will, where layers have sliding windows.

        A window shows the latest slots only, which is right where places and slots go together: in one chain.
        """
        start = self.size
        return all(
            depths[: len(known)] == list(range(len(known)))
            and (not new or new == list(range(start - 1, start - 1 + len(new))))
            and (not new or len(known) == start)
            for depths, known, new in zip(self.depths, self._known, missing.parents, strict=True)
        )

    def reorder(self, places: Sequence[Sequence[int]], width: int) -> torch.Tensor | None:
        """Put the hidden states into the order of the trees that are verified.

        Args:
            places: per row, where each node of its tree stands (see `find`).
            width: nodes of the widest tree.

        Returns:
            `[B, width]`, where each node stands; None where the order was that already.
        """
        assert self.hidden is not None
        if all(list(place) == list(range(self.size)) for place in places):
            return None
        index = torch.tensor([[*place, *[0] * (width - len(place))] for place in places], device="cpu")
        wide = index.to(self.hidden.device)[..., None].expand(-1, -1, self.hidden.shape[-1])
        self.hidden = self.hidden.gather(1, wide)
        return index
