"""A model in two halves: the layers below an exit, and those above it.

The halves share the model's own modules; the model itself is not changed. Each half is a copy of the modules around the
list of layers (the model object, its decoder) whose list ends at the exit, or starts with stand-ins that hand on the
hidden state at the exit. Embeddings, masks and positions are made by the model's own code, so a half needs no knowledge
of the architecture; `selftest.halves_agree` compares the two halves with the whole.

Reference: LayerSkip (arXiv:2404.16710), which reuses keys and hidden states of the early layers in verification.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..host.models import execution_device, text_config
from ..host.modules import watching_hook
from ..memory import remembered
from ..sampling import forked_generators
from .few_rows import quick_on_few_rows
from .layers import find_layers, with_layers


@dataclass
class Handover:
    """The hidden state between two layers, and how this model's layers wrap it."""

    # [B, m, d]
    hidden: torch.Tensor | None = None
    # length of the tuple that a layer returns; None where it returns the hidden state itself
    tuple_length: int | None = None

    def take(self, output: Any) -> None:
        """A layer returned this."""
        wrapped = isinstance(output, tuple)
        self.hidden = output[0] if wrapped else output
        self.tuple_length = len(output) if wrapped else None

    def wrapped(self) -> Any:
        """The hidden state, as a layer would return it."""
        return self.hidden if self.tuple_length is None else (self.hidden, *[None] * (self.tuple_length - 1))


class _StandIn(nn.Module):
    """Stands where a layer stood, and answers for it when asked for its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["stands_in_for"] = layer  # not as a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_in_for"], name)


class _Tap(_StandIn):
    """Runs the layer and keeps what it returned."""

    def __init__(self, layer: nn.Module, handover: Handover) -> None:
        super().__init__(layer)
        self.handover = handover

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["stands_in_for"](*args, **kwargs)
        self.handover.take(output)
        return output


class _Inject(_StandIn):
    """Returns the hidden state handed over, instead of running the layer."""

    def __init__(self, layer: nn.Module, handover: Handover) -> None:
        super().__init__(layer)
        self.handover = handover

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.handover.wrapped()


class Halves:
    """A causal language model split above its first `exit_layer` layers.

    Args:
        model: the model.
        exit_layer: E, the number of layers below the exit; 1 <= E < L.

    Raises:
        UnsupportedModelError: no list of the model's layers is to be found.
    """

    def __init__(self, model: Any, exit_layer: int) -> None:
        self.exit_layer = exit_layer
        path, layers = find_layers(model)
        self.num_layers = len(layers)
        self._handover = Handover()
        lower = [*layers[: exit_layer - 1], _Tap(layers[exit_layer - 1], self._handover)]
        # first E layers, final norm and LM head
        self.below = with_layers(model, path, lower)
        # the same without the LM head, for nodes whose scores nobody reads
        self.below_headless = self.below.base_model
        upper = [_Inject(layer, self._handover) for layer in layers[:exit_layer]]
        # the layers from E on, final norm and LM head, on hidden states that are `given`
        self.above = quick_on_few_rows(with_layers(model, path, [*upper, *layers[exit_layer:]]))
        config = text_config(model)
        self.quiet = {
            name: False for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)
        }

    @contextmanager
    def taken(self) -> Iterator[Handover]:
        """What leaves the last layer below the exit while `below` runs inside."""
        self._handover.hidden = None
        yield self._handover
        if self._handover.hidden is None:
            raise UnsupportedModelError(
                f"{type(self.below).__name__} did not run its first {self.exit_layer} layers by themselves. Use "
                "another speculative_mode."
            )

    @contextmanager
    def given(self, hidden: torch.Tensor) -> Iterator[None]:
        """Let `above` go on from `hidden [B, n, d]` inside."""
        self._handover.hidden = hidden
        try:
            yield
        finally:
            self._handover.hidden = None


@torch.no_grad()
def layer_tuple_length(model: Any) -> int | None:
    """Length of the tuple that a layer of this model returns; None where it returns the hidden state itself."""

    def find() -> int | None:
        _, layers = find_layers(model)
        handover = Handover()
        thread = get_ident()

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if get_ident() == thread:  # other threads may be using the model
                handover.take(output)

        hook = watching_hook(layers[0], keep)
        try:
            with forked_generators(execution_device(model)):
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=execution_device(model)), use_cache=False)
        finally:
            hook.remove()
        return handover.tuple_length

    return remembered(model, "layer tuple", type(model).__qualname__, find)


def head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The model's final norm and LM head on hidden states between layers: `[k, m, d]` to logits `[k, m, V]`."""
    path, layers = find_layers(model)
    head = with_layers(model, path, [_Inject(layers[0], Handover(hidden, layer_tuple_length(model)))])
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    return head(input_ids=ids, use_cache=False, return_dict=True).logits
