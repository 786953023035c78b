"""Which early exit of a model to draft from: how often each agrees with the model, and what that promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..memory import remembered, state_of
from ..target.halves import head_logits
from ..target.layers import find_layers

# exits that are measured, as parts of the layers
_EXITS = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
# positions of the prompts that a call measures, how far back they reach, and how many are enough for a model
_POSITIONS, _REACH, _ENOUGH = 16, 256, 128
# an exit must promise this much more than plain decoding
MARGIN = 1.1
_LONGEST_DRAFT = 8


class ExitChoice:
    """Measures a model's exits on the prompts that pass it anyway.

    Args:
        model: the target.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        _, layers = find_layers(model)
        self.num_layers = len(layers)
        self._layer_size = sum(weight.numel() for layer in layers for weight in layer.parameters()) / len(layers)

    def candidates(self) -> list[int]:
        """The exits worth measuring."""
        last = self.num_layers - 1
        return sorted({min(max(1, round(part * self.num_layers)), last) for part in _EXITS})

    @property
    def agreement(self) -> dict[int, list[int]]:
        """Exit -> [positions where it agreed with the model, positions measured], in the model's present state."""
        return remembered(self.model, "exit agreement", state_of(self.model), dict)

    def knows(self, exits: Sequence[int]) -> bool:
        """Whether enough positions have been measured."""
        agreement = self.agreement
        return all(agreement.get(exit_layer, [0, 0])[1] >= _ENOUGH for exit_layer in exits)

    @staticmethod
    def positions(prompt_lengths: Sequence[int]) -> tuple[int, ...]:
        """Positions to measure in these prompts, counted from their ends."""
        reach = min(_REACH, *prompt_lengths)
        count = max(1, _POSITIONS // len(prompt_lengths))
        return tuple(-1 - place * reach // count for place in range(min(count, reach)))

    def measure(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Count where exits agree with the model.

        Args:
            hidden: layer -> `[B, m, d]`, of every exit and of the last layer.
        """
        exits = [layer for layer in hidden if layer != self.num_layers]
        stacked = torch.stack([hidden[layer].flatten(0, 1) for layer in [*exits, self.num_layers]])
        tokens = head_logits(self.model, stacked).argmax(-1)
        agreement = self.agreement
        for exit_layer, own in zip(exits, tokens[:-1], strict=True):
            known = agreement.setdefault(exit_layer, [0, 0])
            known[0] += int((own == tokens[-1]).sum())
            known[1] += tokens.shape[1]

    def promise(self, exit_layer: int, cost: Callable[[int], float] | None, reuses: bool) -> float:
        """Expected speed-up at the best draft length, by the agreement measured and what forwards cost.

        Args:
            exit_layer: E.
            cost: plain steps that a forward over so many nodes takes; None where costs are not measured.
            reuses: whether verification runs the layers above the exit alone.
        """
        agreed, seen = self.agreement.get(exit_layer, [0, 0])
        acceptance = (agreed + 0.5) / (seen + 1.0)
        # a step is bound by the weights it reads
        output = self.model.get_output_embeddings()
        head = 0 if output is None else output.weight.numel()
        whole = self.num_layers * self._layer_size + head
        below, draft = exit_layer * self._layer_size / whole, (exit_layer * self._layer_size + head) / whole
        best, reached, tokens = 0.0, 1.0, 1.0
        for length in range(1, _LONGEST_DRAFT + 1):
            reached *= acceptance
            tokens += reached
            forward = cost(length + 1) if cost is not None else 1.0
            verification = below + (1.0 - below) * forward if reuses else forward
            best = max(best, tokens / (length * draft + verification))
        return best
