"""Tokens that were committed but that a cache with recurrent states must read again. Bookkeeping: no model, no cache.

A recurrent state cannot forget a rejected draft, so it is put back to what it was before the block, and the tokens of
the block that were kept are *pending*: they are fed again in front of the next forward's own. All rows carry equally
many of them.
"""

from __future__ import annotations

from collections.abc import Sequence

Texts = Sequence[Sequence[int]]


class Replay:
    """What a cache has read since its states were saved, and what it must read again.

    Args:
        rows: B, rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        # [B, r]: committed, not in the cache
        self.pending: list[list[int]] = [[] for _ in range(rows)]
        # [B, m]: read since the states were saved, and may be taken back
        self.read: list[list[int]] = [[] for _ in range(rows)]

    def __len__(self) -> int:
        """r, tokens per row that the next forward feeds again."""
        return len(self.pending[0])

    def block(self, tokens: Texts) -> list[list[int]]:
        """`[B, r + n]`: what a forward is fed whose own tokens these are. Shorter rows are padded at the end."""
        width = max(map(len, tokens))
        return [
            [*before, *row, *[row[0]] * (width - len(row))] for before, row in zip(self.pending, tokens, strict=True)
        ]

    def extend(self, block: Texts) -> None:
        """The cache has read this block; `take_back` may undo it."""
        self.read = [[*row, *new] for row, new in zip(self.read, block, strict=True)]
        self.pending = [[] for _ in self.pending]

    def keep(self) -> None:
        """All that was read stays."""
        self.read = [[] for _ in self.read]

    def take_back(self, tokens: int) -> int:
        """The last tokens of every row are dropped: how many the cache must unread, so that the rest is pending."""
        unread = len(self.read[0])
        self.pending = [row[: unread - tokens] for row in self.read]
        self.keep()
        return unread

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.pending, self.read = [self.pending[row] for row in rows], [self.read[row] for row in rows]
