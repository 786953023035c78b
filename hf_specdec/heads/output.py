"""What heads of every kind hold and share with the base model: the tokens they can draft, and their output layer.

Shapes: k positions, d hidden size, V vocabulary, V_d tokens that can be drafted, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import AdapterError
from ..host.tensors import version_of
from ..memory import remembered
from ..target.few_rows import Linear, linear
from .config import HeadConfig


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


class HeadNetwork(nn.Module):
    """The weights of one adapter. A subclass makes its own and then calls `add_outputs`.

    What they share with the base model comes in through a subclass of `SharedOutput`.
    """

    # [V_d]: the token that each output stands for; None where outputs are tokens
    token_map: torch.Tensor | None
    # an output layer of the adapter's own; None shares the base model's LM head
    output: LowRankOutput | None

    def add_outputs(self, config: HeadConfig, hidden_size: int, vocab_size: int) -> None:
        """Make `output` and `token_map` as the settings ask for them.

        Args:
            config: the settings.
            hidden_size: d, of the base model.
            vocab_size: V, of its LM head.
        """
        drafted = config.draft_vocab_size
        self.output = None
        if config.output_rank is not None:
            self.output = LowRankOutput(hidden_size, config.output_rank, drafted or vocab_size)
        self.register_buffer("token_map", None if drafted is None else torch.arange(drafted))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @torch.no_grad()
    def start_outputs(self, rows: torch.Tensor) -> None:
        """Start output layers of the adapter's own as these rows `[V_d, d]` of the base model's LM head."""
        if self.output is not None:
            self.output.approximate(rows)


class SharedOutput:
    """Heads with the output layer that they draft with: part of the base model's LM head, or one of their own.

    Args:
        weights: of the adapter.
        config: its settings.
        model: the base model.

    Raises:
        AdapterError: the base model's LM head cannot be shared in part.
    """

    def __init__(self, weights: Any, config: Any, model: Any) -> None:
        self.weights, self.config, self.model = weights, config, model
        if not config.has_own_outputs and self.token_map is not None and not _is_plain(model.get_output_embeddings()):
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
            return torch.arange(self.vocab_size, device="cpu")
        outputs = torch.full((self.vocab_size,), -1, device="cpu")
        outputs[self.token_map.cpu()] = torch.arange(len(self.token_map), device="cpu")
        return outputs

    @torch.no_grad()
    def draft_from(self, tokens: torch.Tensor) -> None:
        """Draft these tokens `[V_d]` from now on.

        Output layers of the adapter's own start anew, as the LM head's rows.
        """
        assert self.token_map is not None
        self.token_map.copy_(tokens)
        self.weights.start_outputs(self.model.get_output_embeddings().weight[tokens])

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

        @torch.no_grad()
        def copy() -> tuple[torch.Tensor, torch.Tensor | None]:
            rows = token_map.to(output.weight.device)
            bias = None if output.bias is None else output.bias.detach()[rows].to(self.weights.dtype)
            return output.weight.detach()[rows].to(self.weights.dtype), bias

        key = (*version_of(output.weight), *version_of(token_map), self.weights.dtype)
        return remembered(self.weights, "draft weight", key, copy, most=1)


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
