"""Which slots of a KV cache hold a token, per row, and where each row goes on. Bookkeeping: no model and no cache.

Rows of a batch may keep different numbers of tokens. Shorter rows leave *holes*, slots that the mask hides; where there
is no room or no mask for holes, rows are *realigned*: each row's tokens move to the end, padding before them.

Shapes: B rows carried, n nodes of the last block, m nodes kept of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

# holes are squeezed out once they are more than this part of the slots
MOST_HOLES = 0.25


@dataclass(frozen=True)
class Move:
    """What a KV cache must do after a commit, in this order."""

    # slots of the last block
    width: int = 0
    # [B, m]: nodes that move to the front of the block
    gather: torch.Tensor | None = None
    # slots dropped at the end of the block; None where the realignment drops them
    drop: int | None = None
    # [B, T]: the slots, as they are after the steps above, that every row is rebuilt from
    realign: torch.Tensor | None = None


class Slots:
    """The slots that the rows of a batch use.

    Args:
        count: slots in use.
        next_position: per row, the position of the next token.
        valid: `[B, count]`, True where a slot holds a token; None where all do.
        holes: whether rows may leave holes.
        fixed: whether the cache has a fixed number of slots: it has no room for what finished rows had.
        device: where `valid` lives.
    """

    def __init__(
        self,
        count: int,
        next_position: Sequence[int],
        valid: torch.Tensor | None = None,
        *,
        holes: bool = True,
        fixed: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.count = count
        self.next_position = list(next_position)
        self.valid = valid
        self.holes, self.fixed, self.device = holes, fixed, device
        self.rows = list(range(len(self.next_position)))  # which rows of the batch are carried, in order

    @property
    def batch_size(self) -> int:
        return len(self.next_position)

    def all_valid(self) -> torch.Tensor:
        """`[B, count]`: the slots that hold a token."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.batch_size, self.count, dtype=torch.bool, device=self.device)

    def with_block(self, width: int) -> torch.Tensor | None:
        """`[B, count + width]` with a whole block behind the slots; None where everything holds a token."""
        if self.valid is None:
            return None
        return torch.cat([self.valid, self.valid.new_ones(self.batch_size, width)], dim=1)

    def commit(self, kept: Sequence[Sequence[int]], width: int, idle: Collection[int] = ()) -> Move:
        """Keep these nodes of the last block (ascending, root first) and drop the others.

        Args:
            kept: per row, nodes.
            width: nodes of the block.
            idle: finished rows: what their slots hold no longer matters, and their position stands still.
        """
        longest = max(len(nodes) for row, nodes in enumerate(kept) if row not in idle)
        rows = [list(range(longest)) if row in idle else list(nodes) for row, nodes in enumerate(kept)]
        ragged = any(len(nodes) != longest for nodes in rows)
        for row, nodes in enumerate(rows):
            self.next_position[row] += 0 if row in idle else len(nodes)
        if ragged and not self.holes:
            valid = torch.cat([self.all_valid(), self._block(rows, width)], dim=1)
            return Move(width, realign=self._squeeze(valid, idle))
        gather = None
        if ragged or (longest and any(nodes[-1] != longest - 1 for nodes in rows)):
            gather = torch.tensor([nodes + [0] * (longest - len(nodes)) for nodes in rows], device="cpu")
        self._grow([len(nodes) for nodes in rows], longest)
        too_many = ragged and self.valid is not None and int(self.valid.sum(1).max()) < (1 - MOST_HOLES) * self.count
        realign = None
        if self.valid is not None and (too_many or (idle and self.fixed)):
            realign = self._squeeze(self.valid, idle)
        return Move(width, gather, width - longest, realign)

    def extend(self, tokens: int = 1, idle: Collection[int] = ()) -> None:
        """Every row has taken in so many tokens more, which `take_back` may drop again."""
        self._grow([tokens] * self.batch_size, tokens)
        self.next_position = [at + tokens * (row not in idle) for row, at in enumerate(self.next_position)]

    def take_back(self, counts: Sequence[int], idle: Collection[int] = ()) -> Move:
        """Drop the last `counts[b]` tokens of every row; at most what `extend` has added since the last commit."""
        block = max(counts)
        self.count -= block
        self.next_position = [at - block * (row not in idle) for row, at in enumerate(self.next_position)]
        if self.valid is not None:
            self.valid = self.valid[:, : self.count]
        return self.commit([list(range(block - count)) for count in counts], block, idle)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows only."""
        self.rows = [self.rows[row] for row in rows]
        self.next_position = [self.next_position[row] for row in rows]
        if self.valid is not None:
            self.valid = self.valid[torch.tensor(list(rows), device=self.valid.device)]

    def _grow(self, lengths: Sequence[int], width: int) -> None:
        """A block of `width` slots is in use, of which each row fills the first so many."""
        if self.valid is not None or any(length != width for length in lengths):
            block = self._block([range(length) for length in lengths], width)
            self.valid = torch.cat([self.all_valid(), block], dim=1)
        self.count += width

    def _block(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """`[B, width]`: True at these nodes of each row."""
        block = torch.zeros(len(rows), width, dtype=torch.bool, device="cpu")
        for row, nodes in enumerate(rows):
            block[row, list(nodes)] = True
        return block.to(self.device)

    def _squeeze(self, valid: torch.Tensor, idle: Collection[int]) -> torch.Tensor:
        """Put every row's tokens to the end of the slots. `[B, T]`: the slot each comes from."""
        running = [row for row in range(self.batch_size) if row not in idle]
        total = int(valid.sum(1)[running].max())
        order = torch.sort(valid.int(), dim=1, stable=True).indices
        source = order[:, order.shape[1] - total :]
        valid = valid.gather(1, source)
        self.valid = None if bool(valid.all()) else valid
        self.count = total
        return source
