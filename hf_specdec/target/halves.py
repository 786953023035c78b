"""A model in two halves: the layers below an exit, and those above it.

The halves share the model's own modules; the model itself is not changed. (Only `watch`, which looks at what leaves its
layers in one forward, hooks them, for as long as that forward lasts.) Each half is a copy of the
shells around the list of layers (the model object, its decoder) whose list ends at the exit, or starts with stand-ins
that hand on the hidden state at the exit. Embeddings, masks and positions are made by the model's own code, so a half
needs no knowledge of the architecture; `structure.halves_agree` compares the two halves with the whole.

Reference: LayerSkip (arXiv:2404.16710), which reuses keys and hidden states of the early layers in verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..host.modules import shell
from .few_rows import quick_on_few_rows


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
        self.__dict__["_stands_for"] = layer  # not as a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)


class _Tap(_StandIn):
    """Runs the layer and keeps what it returned."""

    def __init__(self, layer: nn.Module, handover: Handover) -> None:
        super().__init__(layer)
        self.handover = handover

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["_stands_for"](*args, **kwargs)
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
        self.below = _with_layers(model, path, lower)
        # the same without the LM head, for nodes whose scores nobody reads
        self.below_headless = self.below.base_model
        upper = [_Inject(layer, self._handover) for layer in layers[:exit_layer]]
        # the layers from E on, final norm and LM head, on hidden states that are `given`
        self.above = quick_on_few_rows(_with_layers(model, path, [*upper, *layers[exit_layer:]]))
        config = model.config.get_text_config(decoder=True)
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


def find_layers(model: Any) -> tuple[tuple[str, ...], Sequence[nn.Module]]:
    """Where the model's list of layers is, and its layers.

    Raises:
        UnsupportedModelError: there is no such list, or more than one.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    depth = min((name.count(".") for name, _ in found), default=0)
    outermost = [(name, module) for name, module in found if name.count(".") == depth]
    if len(outermost) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {'no list' if not found else 'several lists'} of {count} layers, so its "
            "layers cannot be run in two halves. Use another speculative_mode."
        )
    name, layers = outermost[0]
    return tuple(name.split(".")), list(layers)


@contextmanager
def watch(
    model: Any, exits: Sequence[int], positions: Sequence[int] | None, seen: dict[int, Handover]
) -> Iterator[None]:
    """Put into `seen` what leaves the layers below these exits in this thread's forward inside.

    At these (negative) positions, or at all. An exit above the last layer is the model's own. Hooks are there for as
    long as the context lasts.
    """
    _, layers = find_layers(model)
    seen.clear()
    thread = get_ident()
    hooks = []
    try:
        for exit_layer in exits:

            def keep(module: nn.Module, args: Any, output: Any, exit_layer: int = exit_layer) -> None:
                if get_ident() != thread:  # other threads may be generating with the same model
                    return
                seen[exit_layer] = handover = Handover()
                handover.take(output)
                assert handover.hidden is not None
                if positions is not None:
                    handover.hidden = handover.hidden[:, [at for at in positions if -at <= handover.hidden.shape[1]]]

            hooks.append(layers[exit_layer - 1].register_forward_hook(keep))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def head_logits(model: Any, handover: Handover) -> torch.Tensor:
    """The model's final norm and LM head on hidden states between layers: `[k, m, d]` to logits `[k, m, V]`."""
    assert handover.hidden is not None
    path, layers = find_layers(model)
    head = _with_layers(model, path, [_Inject(layers[0], handover)])
    ids = torch.zeros(handover.hidden.shape[:2], dtype=torch.long, device=handover.hidden.device)
    return head(input_ids=ids, use_cache=False, return_dict=True).logits


def _with_layers(model: Any, path: Sequence[str], layers: Sequence[nn.Module]) -> Any:
    """The model with other layers: its shells are copied, everything else is shared."""
    outer = at = shell(model)
    for name in path[:-1]:
        inner = shell(at._modules[name])
        at._modules[name] = inner
        at = inner
    at._modules[path[-1]] = nn.ModuleList(layers)
    return outer
