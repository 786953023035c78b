"""Attention masks of token trees: each node sees the past and its own ancestors, as far as a window reaches.

Masks are made from what each slot holds, never from slot numbers, so rows may have advanced by different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import tree


def visible(
    past: torch.Tensor, parents: Sequence[Sequence[int]], width: int, window: int | None = None
) -> torch.Tensor:
    """`[B, n, slots + n]`: what each node of a block sees.

    Args:
        past: `[B, slots]`, True where a slot before the block holds a token.
        parents: per row, of the nodes; rows with fewer are padded at the end.
        width: n, nodes of the block.
        window: keys further back than this are invisible; None where everything is seen. Slots of a windowed layer
            have no holes, so distances between slots are distances between positions.
    """
    batch, slots = past.shape
    block = torch.zeros(batch, width, width, dtype=torch.bool, device="cpu")
    depth = torch.zeros(batch, width, dtype=torch.long, device="cpu")
    for row, row_parents in enumerate(parents):
        n = len(row_parents)
        block[row, :n, :n] = torch.tensor(tree.ancestors(row_parents), device="cpu")
        depth[row, :n] = torch.tensor(tree.depths(row_parents), device="cpu")
    # padding sees itself, so that no row of the softmax is empty
    block |= torch.eye(width, dtype=torch.bool, device="cpu")
    seen = past[:, None].expand(-1, width, -1)
    if window is not None:
        near = slots + depth[:, :, None] - torch.arange(slots, device="cpu") < window
        seen = seen & near.to(past.device)
        block &= depth[:, :, None] - depth[:, None, :] < window
    return torch.cat([seen, block.to(past.device)], dim=-1)


def as_argument(allowed: torch.Tensor, keys: int, form: str, dtype: torch.dtype) -> torch.Tensor:
    """A mask `[B, n, m]` as a model takes it, `[B, 1, n, keys]`.

    Args:
        allowed: what each node sees.
        keys: keys that attention will hold; those beyond m are empty slots of a static cache.
        form: `"boolean"` or `"additive"`.
        dtype: of an additive mask.
    """
    if allowed.shape[-1] < keys:
        allowed = torch.nn.functional.pad(allowed, (0, keys - allowed.shape[-1]))
    allowed = allowed[:, None]
    if form == "boolean":
        return allowed
    lowest = torch.finfo(dtype).min
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, lowest)
