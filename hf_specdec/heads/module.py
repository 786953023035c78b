"""The heads themselves: small networks on the target's last hidden state, and what they share with the target.

Shapes: k positions, d hidden size, H heads, V_d tokens that can be drafted.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from ..errors import AdapterError
from ..target.few_rows import Linear, linear
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


class LowRankOutput(nn.Module):
    """An output layer of two factors, d to r and r to V_d.

    Args:
        hidden_size: d.
        rank: r.
        drafted: V_d.
    """

    def __init__(self, hidden_size: int, rank: int, drafted: int) -> None:
        super().__init__()
        self.down = Linear(hidden_size, rank, bias=False)
        self.up = Linear(rank, drafted, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(states))

    @torch.no_grad()
    def approximate(self, weight: torch.Tensor) -> None:
        """Become the closest layer of this rank to a full one `[V_d, d]`."""
        full = weight.float()
        # the directions that hold most of it: the last eigenvectors of its Gram matrix
        directions = torch.linalg.eigh(full.T @ full).eigenvectors[:, -self.down.out_features :]
        self.down.weight.copy_(directions.T)
        self.up.weight.copy_(full @ directions)


class MedusaHeads(nn.Module):
    """The weights of one adapter; what they share with the base model comes in through `BoundHeads`.

    Args:
        config: their settings.
        hidden_size: d, of the base model.
        embedding_size: of its token embeddings.
        vocab_size: of its LM head.
    """

    token_map: torch.Tensor | None
    output: LowRankOutput | None

    def __init__(self, config: MedusaConfig, hidden_size: int, embedding_size: int, vocab_size: int) -> None:
        super().__init__()
        sees = embedding_size if config.head_type == "sequential" else 0
        drafted = config.draft_vocab_size or vocab_size
        count = 1 if config.tied_heads else config.num_heads
        self.heads = nn.ModuleList(Head(hidden_size, config.num_layers, sees) for _ in range(count))
        self.lm_heads: nn.ModuleList | None = None
        if config.own_lm_head:
            self.lm_heads = nn.ModuleList(Linear(hidden_size, drafted, bias=False) for _ in range(config.num_heads))
        self.output = new_output(config, hidden_size, vocab_size)
        # [V_d]: the token that each output of the heads stands for
        self.register_buffer("token_map", torch.arange(drafted) if config.draft_vocab_size is not None else None)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def new_output(config: MedusaConfig, hidden_size: int, vocab_size: int) -> LowRankOutput | None:
    """The output layer of an adapter's own that its settings ask for."""
    if config.output_rank is None:
        return None
    return LowRankOutput(hidden_size, config.output_rank, config.draft_vocab_size or vocab_size)


# weights of an adapter -> [what the copy was made of, rows of the LM head, their biases]
_draft_weights: WeakKeyDictionary[nn.Module, tuple[tuple, torch.Tensor, torch.Tensor | None]] = WeakKeyDictionary()


class SharedOutput:
    """The output layer that an adapter drafts with: part of the base model's LM head, or one of its own.

    Args:
        weights: of the adapter: `token_map`, perhaps `output`, and a dtype.
        model: the base model.
        own: whether the adapter has others.

    Raises:
        AdapterError: the base model's LM head cannot be shared in part.
    """

    def __init__(self, weights: Any, model: Any, own: bool = False) -> None:
        self.weights, self.model = weights, model
        shares_lm_head = not own and weights.output is None
        if shares_lm_head and self.token_map is not None and not _is_plain(model.get_output_embeddings()):
            raise AdapterError(
                f"The LM head of {type(model).__name__} is no plain linear layer (quantized?), so heads with a trimmed "
                "vocabulary cannot share it. Use heads with an output_rank, or without draft_vocab_size."
            )

    @property
    def vocab_size(self) -> int:
        """V, of the base model's LM head."""
        return lm_head_shape(self.model)[0]

    @property
    def token_map(self) -> torch.Tensor | None:
        """`[V_d]`: the token each output stands for; None where outputs are tokens."""
        return self.weights.token_map

    def tokens(self, outputs: torch.Tensor) -> torch.Tensor:
        """The tokens that these outputs stand for."""
        return outputs if self.token_map is None else self.token_map[outputs]

    def outputs(self) -> torch.Tensor:
        """`[V]`, on the CPU: the output that stands for each token, -1 where none does."""
        if self.token_map is None:
            return torch.arange(self.vocab_size)
        outputs = torch.full((self.vocab_size,), -1)
        outputs[self.token_map.cpu()] = torch.arange(len(self.token_map))
        return outputs

    @torch.no_grad()
    def draft_from(self, tokens: torch.Tensor) -> None:
        """Draft these tokens `[V_d]` from now on.

        Output layers of the adapter's own start anew, as the LM head's rows.
        """
        assert self.token_map is not None
        self.token_map.copy_(tokens)
        start_outputs(self.weights, self.model.get_output_embeddings().weight[tokens])

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[k, V_d]` as scores `[k, V]` over the base model's vocabulary.

        What cannot be drafted gets next to nothing, not -inf: processors may rule out all the rest.
        """
        if self.token_map is None:
            return scores
        least = scores.min(dim=-1, keepdim=True).values - 50.0
        wide = least.expand(*scores.shape[:-1], self.vocab_size).clone()
        wide[..., self.token_map] = scores
        return wide

    def shared_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores `[..., V_d]`, float32, of what the LM head would be given `[..., d]`."""
        if self.weights.output is not None:
            return self.weights.output(states).float()
        output = self.model.get_output_embeddings()
        if self.token_map is None:
            return output(states.to(self.model.dtype)).float()
        weight, bias = self.draft_weight()
        return linear(states, weight, bias).float()

    def draft_weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows `[V_d, d]` of the shared LM head that can be drafted, and their biases. Copied once."""
        output, token_map = self.model.get_output_embeddings(), self.token_map
        assert token_map is not None
        key = (*_version(output.weight), *_version(token_map), self.weights.dtype)
        known = _draft_weights.get(self.weights)
        if known is None or known[0] != key:
            with torch.no_grad():
                rows = token_map.to(output.weight.device)
                bias = None if output.bias is None else output.bias.detach()[rows].to(self.weights.dtype)
                known = _draft_weights[self.weights] = key, output.weight.detach()[rows].to(self.weights.dtype), bias
        return known[1:]


class BoundHeads(SharedOutput):
    """Heads together with the base model whose embedding and LM head they use.

    Args:
        heads: the weights.
        config: their settings.
        model: the base model.

    Raises:
        AdapterError: the base model's LM head cannot be shared in part.
    """

    def __init__(self, heads: MedusaHeads, config: MedusaConfig, model: Any) -> None:
        super().__init__(heads, model, own=heads.lm_heads is not None)
        self.heads, self.config = heads, config

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
        """The state `[k, d]` of a head. For a sequential head: from the state before, and the token drafted there."""
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


@torch.no_grad()
def start_outputs(weights: Any, rows: torch.Tensor) -> None:
    """Start an adapter's own output layers as these rows `[V_d, d]` of the base model's LM head."""
    for layer in getattr(weights, "lm_heads", None) or ():
        layer.weight.copy_(rows)
    if weights.output is not None:
        weights.output.approximate(rows)


def lm_head_shape(model: Any) -> tuple[int, int]:
    """(V, d) of a model's LM head.

    Raises:
        AdapterError: it has none that could be asked.
    """
    output = model.get_output_embeddings()
    rows, columns = getattr(output, "out_features", None), getattr(output, "in_features", None)
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise AdapterError(f"{type(model).__name__} has no linear LM head, so no draft heads can be put beside it.")
    return rows, columns


def _is_plain(output: Any) -> bool:
    return type(output) is nn.Linear and output.weight.is_floating_point() and output.weight.device.type != "meta"


def _version(tensor: torch.Tensor) -> tuple:
    """Differs once a tensor has been changed (as far as torch keeps count)."""
    return tensor.data_ptr(), tensor.device, -1 if tensor.is_inference() else tensor._version
