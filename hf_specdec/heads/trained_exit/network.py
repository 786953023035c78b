"""A trained exit: one decoder layer that turns the hidden state at an early exit into scores (Kangaroo).

It stands in for the layers above the exit while drafting. Its own keys and values are few, and are kept by `ExitReader`
for one call of `generate`. Reference: Kangaroo (arXiv:2404.18911).

Shapes: B rows, n tokens, T tokens seen before, d hidden size, h attention heads of c channels, V_d tokens to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...errors import AdapterError
from ..output import HeadNetwork, SharedOutput, lm_head_shape
from .config import TrainedExitConfig

_CHANNELS = 64
_ROPE_BASE = 10_000.0
# of the feed-forward network, relative to the hidden size
_EXPANSION = 2


class ExitLayer(nn.Module):
    """Attention and a gated feed-forward network, each on normalised input and added to it; then a norm.

    Both start by adding nothing, so that an untrained exit is the hidden state under a norm.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        inner = _EXPANSION * hidden_size
        self.attention_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.gate = nn.Linear(hidden_size, inner, bias=False)
        self.up = nn.Linear(hidden_size, inner, bias=False)
        self.down = nn.Linear(inner, hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        # channels of a head; the whole width where it cannot be divided
        self.channels = _CHANNELS if hidden_size % _CHANNELS == 0 else hidden_size
        for weight in (self.out.weight, self.down.weight):
            nn.init.zeros_(weight)

    def keys_and_values(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, h, n, c]` of tokens with these hidden states `[B, n, d]` at these positions `[B, n]`."""
        normed = self.attention_norm(hidden)
        return _rotated(self._split(self.key(normed)), positions), self._split(self.value(normed))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the LM head is given `[B, n, d]`.

        Args:
            hidden: `[B, n, d]`, at the exit.
            positions: `[B, n]`.
            keys, values: `[B, h, T + n, c]`, of these tokens and those before.
            mask: `[B, 1, n, T + n]`, True where a token sees another; None where all see all.
        """
        queries = _rotated(self._split(self.query(self.attention_norm(hidden))), positions)
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        hidden = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return self.norm(hidden)

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.channels)).transpose(1, 2)


def _rotated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (arXiv:2104.09864) of `states [B, h, n, c]` at `positions [B, n]`."""
    half = states.shape[-1] // 2
    frequency = _ROPE_BASE ** (-torch.arange(half, device=states.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency
    cosine, sine = angle.cos().to(states.dtype), angle.sin().to(states.dtype)
    first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


class TrainedExit(HeadNetwork):
    """The weights of one adapter.

    Args:
        config: its settings.
        hidden_size: d, of the base model.
        vocab_size: of its LM head.
    """

    def __init__(self, config: TrainedExitConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.layer = ExitLayer(hidden_size)
        self.add_outputs(config, hidden_size, vocab_size)


def new_exit(config: TrainedExitConfig, model: Any) -> TrainedExit:
    """A new exit of these settings for a model."""
    vocab_size, hidden_size = lm_head_shape(model)
    return TrainedExit(config, hidden_size, vocab_size)


def check_exit_layer(config: TrainedExitConfig, model: Any) -> None:
    """Raise `AdapterError` unless the model has layers above the exit."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if config.exit_layer >= layers:
        origin = config.base_model_name_or_path
        of = f" (it was made for {origin})" if origin else ""
        raise AdapterError(
            f"This exit is after layer {config.exit_layer}; {type(model).__name__} has only {layers} layers{of}."
        )


class BoundExit(SharedOutput):
    """A trained exit together with the base model whose LM head it may use.

    Args:
        weights: the weights.
        config: their settings.
        model: the base model.

    Raises:
        AdapterError: the base model's LM head cannot be shared in part.
    """

    weights: TrainedExit
    config: TrainedExitConfig

    @property
    def exit_layer(self) -> int:
        """E, the number of the base model's layers below the exit."""
        return self.config.exit_layer

    def reader(self, rows: int) -> ExitReader:
        """A reader for the rows of one call of `generate`."""
        return ExitReader(self, rows)

    def states(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the LM head is given `[B, n, d]` at every token of whole texts.

        Args:
            hidden: `[B, n, d]`, at the exit; padding stands on the right.
            mask: `[B, n]`, True where there is a token.
        """
        hidden, layer = hidden.to(self.weights.dtype), self.weights.layer
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        keys, values = layer.keys_and_values(hidden, positions)
        causal = positions[:, :, None] >= positions[:, None, :]
        seen = causal & mask[:, None, :] | torch.eye(hidden.shape[1], dtype=torch.bool, device=hidden.device)
        return layer(hidden, positions, keys, values, seen[:, None])


class ExitReader:
    """A trained exit reading the rows of one call of `generate`, token by token.

    Args:
        exit_: the exit.
        rows: number of rows.
    """

    def __init__(self, exit_: BoundExit, rows: int) -> None:
        self.exit = exit_
        self._keys: list[torch.Tensor | None] = [None] * rows  # per row [1, h, T, c]
        self._values: list[torch.Tensor | None] = [None] * rows
        self._committed = [0] * rows
        # hidden states [n, d] of what was committed since: reading costs nothing while nothing is drafted
        self._unread: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def length(self, row: int) -> int:
        """Tokens of a row, drafts included."""
        keys = self._keys[row]
        return (0 if keys is None else keys.shape[2]) + sum(map(len, self._unread[row]))

    def commit(self, row: int, hidden: torch.Tensor) -> None:
        """Forget the drafts of a row, and go on with these committed tokens, hidden states at the exit `[n, d]`."""
        self._forget_drafts(row)
        self._unread[row].append(hidden)

    def draft(self, rows: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Read one drafted token in each of these rows, `hidden [k, d]`: scores `[k, V_d]` of what follows it."""
        layer, states = self.exit.weights.layer, []
        for row, state in zip(rows, hidden.to(self.exit.weights.dtype), strict=True):
            self._read(row)
            position = torch.tensor([[self.length(row)]], device=hidden.device)
            self._append(row, state[None])
            keys, values = self._keys[row], self._values[row]
            assert keys is not None
            assert values is not None
            states.append(layer(state[None, None], position, keys, values, None)[:, 0])
        return self.exit.shared_logits(torch.cat(states))

    def start_drafting(self) -> None:
        """Forget what was drafted before and not committed."""
        for row in range(len(self._keys)):
            self._forget_drafts(row)

    def _read(self, row: int) -> None:
        """Read what was committed."""
        if self._unread[row]:
            unread = torch.cat(self._unread[row])
            self._unread[row] = []
            self._append(row, unread)
            self._committed[row] = self.length(row)

    def _append(self, row: int, hidden: torch.Tensor) -> None:
        start = self.length(row)
        hidden = hidden.to(self.exit.weights.dtype)[None]
        positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        keys, values = self.exit.weights.layer.keys_and_values(hidden, positions)
        known_keys, known_values = self._keys[row], self._values[row]
        self._keys[row] = keys if known_keys is None else torch.cat([known_keys, keys], dim=2)
        self._values[row] = values if known_values is None else torch.cat([known_values, values], dim=2)

    def _forget_drafts(self, row: int) -> None:
        keys, values, length = self._keys[row], self._values[row], self._committed[row]
        if keys is not None and values is not None and keys.shape[2] > length:
            self._keys[row], self._values[row] = keys[:, :, :length], values[:, :, :length]
