"""Draft -> Scores: one forward of the target over every row's tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..draft import Draft, Scores
from ..target.cached_model import CachedModel
from ..target.hidden import LastHidden, watch_head


def verify(
    target: CachedModel,
    draft: Draft,
    needs_hidden: bool = False,
    output_hidden_states: bool = False,
    output_attentions: bool = False,
) -> Scores:
    """Score the trees of the rows that the target still carries, in its order."""
    rows = target.rows
    model_kwargs: dict[str, Any] = {}
    if output_hidden_states:
        model_kwargs["output_hidden_states"] = True
    if output_attentions:
        model_kwargs["output_attentions"] = True
    with watch_head(target.model) if needs_hidden else nullcontext(LastHidden()) as last:
        output = target.forward(
            [draft.tokens[row] for row in rows], [draft.parents[row] for row in rows], **model_kwargs
        )
    return Scores(
        logits=output.logits,
        rows=list(rows),
        hidden=last.hidden,
        hidden_states=output.hidden_states if output_hidden_states else None,
        attentions=output.attentions if output_attentions else None,
    )


def node_outputs(
    target: CachedModel, scores: Scores, paths: Sequence[Sequence[int]], slots_before: int
) -> tuple[tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
    """Hidden states and attentions of the last node of each path, shaped as a plain step returns them.

    Per layer `[B, 1, d]` and `[B, heads, 1, keys]`: a plain step sees the past and the path, no other branch.

    Args:
        target: the model that made the scores.
        scores: a forward's scores.
        paths: per row, nodes from the root to the one that is asked for; all of one length.
        slots_before: slots the cache held before that forward.
    """
    nodes = [path[-1] for path in paths]
    rows = list(range(len(paths)))
    hidden = None
    if scores.hidden_states is not None:
        hidden = tuple(layer[rows, nodes][:, None] for layer in scores.hidden_states)
    attentions = None
    if scores.attentions is not None:
        width = scores.logits.shape[1]
        attentions = tuple(
            _plain_attention(layer, paths, width, slots_before, *target.attention_layout(index))
            for index, layer in enumerate(scores.attentions)
        )
    return hidden, attentions


def _plain_attention(
    attention: torch.Tensor,
    paths: Sequence[Sequence[int]],
    width: int,
    slots_before: int,
    static: bool,
    window: int | None,
) -> torch.Tensor:
    """The attention `[B, heads, n, keys]` of each path's last node, over past and path only."""
    keys = attention.shape[-1]
    start = slots_before if static else keys - width
    picked = []
    for row, path in enumerate(paths):
        weights = attention[row, :, path[-1]]
        on_path = weights[:, [start + node for node in path]]
        plain = torch.cat([weights[:, :start], on_path], dim=-1)
        if static:
            plain = torch.nn.functional.pad(plain, (0, keys - plain.shape[-1]))
        elif window is not None:
            plain = plain[:, -window:]
        picked.append(plain[:, None])
    return torch.stack(picked)
