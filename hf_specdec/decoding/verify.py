"""Draft -> Scores: one forward of the target over every row's tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..draft import AttentionLayout, Draft, Scores
from ..target.cached_model import CachedModel
from .transcript import Outputs, StepOutputs


def verify(target: CachedModel, draft: Draft, layers: Sequence[int], outputs: Outputs) -> Scores:
    """Score the trees of the rows that the target still carries, in its order.

    Args:
        target: the target with its KV cache.
        draft: for all rows of the batch.
        layers: whose hidden states the drafter reads.
        outputs: what the user wants returned per step.
    """
    rows, wanted = list(target.rows), _wanted(outputs)
    layout = AttentionLayout(target.past_slots, *_static_and_windows(target)) if wanted else None
    output = target.forward([draft.tokens[row] for row in rows], [draft.parents[row] for row in rows], layers, **wanted)
    return Scores(
        logits=output.logits,
        rows=rows,
        hidden=output.hidden,
        hidden_states=output.hidden_states if outputs.hidden_states is not None else None,
        attentions=output.attentions if outputs.attentions is not None else None,
        cross_attentions=output.cross_attentions if outputs.attentions is not None else None,
        layout=layout,
    )


def _wanted(outputs: Outputs) -> dict[str, Any]:
    wanted = {
        "output_hidden_states": outputs.hidden_states is not None,
        "output_attentions": outputs.attentions is not None,
    }
    return {name: True for name, asked in wanted.items() if asked}


def _static_and_windows(target: CachedModel) -> tuple[bool, tuple[int | None, ...]]:
    static, windows = target.attention_layout()
    return static, tuple(windows)


def node_outputs(scores: Scores, paths: Sequence[Sequence[int]]) -> StepOutputs:
    """Hidden states and attentions of the last node of each path, shaped as a plain step returns them.

    A plain step sees the past and the path, no other branch. Those of the prompts' forward are returned whole.

    Args:
        scores: of a forward.
        paths: per row, nodes from the root to the one that is asked for; all of one length.
    """
    layout = scores.layout
    if layout is None:
        return StepOutputs(scores.hidden_states, scores.attentions, scores.cross_attentions)
    nodes = [path[-1] for path in paths]
    rows = list(range(len(paths)))
    hidden = None
    if scores.hidden_states is not None:
        hidden = tuple(layer[rows, nodes][:, None] for layer in scores.hidden_states)
    attentions = cross = None
    if scores.cross_attentions is not None:
        cross = tuple(layer[rows, :, nodes][:, :, None] for layer in scores.cross_attentions)
    if scores.attentions is not None:
        width = scores.logits.shape[1]
        attentions = tuple(
            _plain_attention(layer, paths, width, layout.slots_before, layout.static, layout.windows[index])
            for index, layer in enumerate(scores.attentions)
        )
    return StepOutputs(hidden, attentions, cross)


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
