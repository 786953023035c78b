"""Medusa's heads: small networks on the target's last hidden state.

Shapes: k positions, d hidden size, H heads, V_d tokens that can be drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...target.few_rows import Linear
from ..output import HeadNetwork, SharedOutput, lm_head_shape
from .config import MedusaConfig


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`. Starts as the identity.

    The first block of a sequential head applies W to `[x, e]`, where e is the embedding of the token drafted before,
    scaled to a mean square of one.
    """

    def __init__(self, hidden_size: int, embedding_size: int = 0) -> None:
        super().__init__()
        self.linear = Linear(hidden_size + embedding_size, hidden_size)
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        seen = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return hidden + functional.silu(self.linear(seen))


class Head(nn.Module):
    """Residual blocks one after the other; the first of a sequential head sees the drafted token."""

    def __init__(self, hidden_size: int, num_layers: int, embedding_size: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ResidualBlock(hidden_size, embedding_size if layer == 0 else 0) for layer in range(num_layers)
        )

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        first, *others = self.layers
        hidden = first(hidden, embedded)
        for layer in others:
            hidden = layer(hidden)
        return hidden


class MedusaHeads(HeadNetwork):
    """The weights of one adapter; what they share with the base model comes in through `BoundHeads`.

    Args:
        config: their settings.
        hidden_size: d, of the base model.
        embedding_size: of its token embeddings.
        vocab_size: of its LM head.
    """

    def __init__(self, config: MedusaConfig, hidden_size: int, embedding_size: int, vocab_size: int) -> None:
        super().__init__()
        sees = embedding_size if config.head_type == "sequential" else 0
        count = 1 if config.tied_heads else config.num_heads
        self.heads = nn.ModuleList(Head(hidden_size, config.num_layers, sees) for _ in range(count))
        self.lm_heads: nn.ModuleList | None = None
        if config.own_lm_head:
            drafted = config.draft_vocab_size or vocab_size
            self.lm_heads = nn.ModuleList(Linear(hidden_size, drafted, bias=False) for _ in range(config.num_heads))
        self.add_outputs(config, hidden_size, vocab_size)

    @torch.no_grad()
    def start_outputs(self, rows: torch.Tensor) -> None:
        super().start_outputs(rows)
        layer: Any
        for layer in self.lm_heads or ():
            layer.weight.copy_(rows)


def new_heads(config: MedusaConfig, model: Any) -> MedusaHeads:
    """New heads of these settings for a model."""
    vocab_size, hidden_size = lm_head_shape(model)
    return MedusaHeads(config, hidden_size, model.get_input_embeddings().embedding_dim, vocab_size)


class BoundHeads(SharedOutput):
    """Heads together with the base model whose embedding and LM head they use.

    Args:
        heads: the weights.
        config: their settings.
        model: the base model.

    Raises:
        AdapterError: the base model's LM head cannot be shared in part.
    """

    config: MedusaConfig

    def __init__(self, heads: MedusaHeads, config: MedusaConfig, model: Any) -> None:
        super().__init__(heads, config, model)
        self.heads = heads

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def is_sequential(self) -> bool:
        return self.config.head_type == "sequential"

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state `[k, d]` that the heads start from, given the target's last hidden states `[k, d]`."""
        return hidden.to(self.heads.dtype)

    def step(self, head: int, state: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The state `[k, d]` of a head. For a sequential head: from the state before, and the token drafted there.

        Args:
            head: index of the head among the weights, from 0.
            state: `[k, d]`, of the head before; for independent heads and the first one, that of `start`.
            tokens: `[k]`, drafted by the head before; of the first head, the last committed ones.
        """
        embedded = None
        if self.is_sequential:
            assert tokens is not None
            embedded = self.model.get_input_embeddings()(tokens).to(self.heads.dtype)
            # models differ a hundredfold in the scale of their embeddings, and a head learns at that pace
            embedded = functional.rms_norm(embedded, embedded.shape[-1:])
        return self.heads.heads[0 if self.config.tied_heads else head](state, embedded)

    def all_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states `[H, k, d]` of independent heads."""
        state = self.start(hidden)
        return torch.stack([head(state) for head in self.heads.heads])

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """Scores `[k, V_d]` of a head in these states `[k, d]`, float32."""
        if self.heads.lm_heads is not None:
            return self.heads.lm_heads[head](state).float()
        return self.shared_logits(state)

    def all_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores `[H, k, V_d]` of all heads in their states `[H, k, d]`, float32."""
        if self.heads.lm_heads is not None:
            return torch.stack([self.logits(head, state) for head, state in enumerate(states)])
        return self.shared_logits(states)

    def output_weight(self, head: int) -> Any:
        """`[V_d, d]`: the output layer of a head, its own or its part of the shared one."""
        if self.heads.lm_heads is not None:
            return self.heads.lm_heads[head].weight
        if self.heads.output is not None:
            return self.heads.output.up.weight @ self.heads.output.down.weight
        if self.token_map is not None:
            return self.draft_weight()[0]
        return self.model.get_output_embeddings().weight.to(self.heads.dtype)
