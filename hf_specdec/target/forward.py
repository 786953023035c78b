"""The one seam through which every forward of a model with a KV cache runs.

How a forward is computed is decided here and nowhere else: few rows multiplied quickly on a CPU, a model in two halves,
hidden states that a drafter reads. What goes into a forward (tokens, positions, masks) is `cached_model`'s affair.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..host.generate import CACHE_KEY, prefill
from ..host.models import argument_names, execution_device, last_logits_only, text_config
from . import kv_cache as kv
from .extras import Extras
from .few_rows import quick_on_few_rows
from .halves import Halves
from .hidden import watch


@dataclass(frozen=True)
class Output:
    """What a forward gave."""

    # [B, n, V]
    logits: torch.Tensor
    # layer -> [B, n, d], those asked for
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    # per layer [B, n, d] and [B, heads, n, keys], where the user asked for them
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    # per layer [B, heads, n, keys of the encoder's output]
    cross_attentions: tuple[torch.Tensor, ...] | None = None

    def after(self, tokens: int) -> Output:
        """Without what belongs to the first tokens."""
        if not tokens:
            return self
        return Output(
            logits=self.logits[:, tokens:],
            hidden={layer: states[:, tokens:] for layer, states in self.hidden.items()},
            hidden_states=self.hidden_states and tuple(states[:, tokens:] for states in self.hidden_states),
            attentions=self.attentions
            and tuple(None if weights is None else weights[:, :, tokens:] for weights in self.attentions),
        )


class Forwards:
    """Runs the forwards of a model.

    Args:
        model: the model. It is not changed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = argument_names(model)
        self.takes_positions = self.names.positions in inspect.signature(model.forward).parameters
        self._on_few_rows = quick_on_few_rows(model)

    def prompt(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        layers: Sequence[int] = (),
        positions: Sequence[int] | None = None,
    ) -> tuple[Output, Any]:
        """The forward over the prompts, as plain `generate` makes it: its output, and the cache that it filled.

        Args:
            input_ids: `[B, P]`.
            generation_config: of the call.
            model_kwargs: of the call.
            layers: whose hidden states are wanted.
            positions: where, counted from the end; None for all.
        """
        with watch(self.model, layers, positions, of_prompt=True) as hidden:
            output = prefill(self.model, input_ids, generation_config, model_kwargs)
        return _output(output, hidden), output[CACHE_KEY]

    def texts(
        self, texts: Sequence[Sequence[int]], extras: Extras | None = None
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """A forward over texts, padded on the left, into a new cache.

        Args:
            texts: one per row.
            extras: what the forward is given besides; None for nothing.

        Returns:
            logits `[B, V]` after each text; the cache; `[B, longest]`, where there is a token, None where everywhere.
        """
        longest = max(map(len, texts))
        padding = [longest - len(text) for text in texts]
        device = execution_device(self.model)
        ids = torch.tensor([[0] * pad + list(text) for text, pad in zip(texts, padding, strict=True)], device=device)
        valid = torch.arange(longest, device=device) >= torch.tensor(padding, device=device)[:, None]
        extras = extras or Extras()
        cache = kv.new_cache(text_config(self.model), with_source=extras.source is not None)
        inputs: dict[str, Any] = {self.names.ids: ids, "use_cache": True, CACHE_KEY: cache}
        inputs.update(extras.arguments(longest))
        if any(padding):
            inputs[self.names.mask] = valid.long()
        if self.takes_positions:
            inputs[self.names.positions] = (valid.long().cumsum(-1) - 1).clamp(min=0)
        inputs.update(last_logits_only(self.model))
        logits = self.model(**inputs, return_dict=True).logits[:, -1]
        kv.record_past(cache, True)
        kv.crop(cache, 0)
        return logits, cache, valid if any(padding) else None

    def block(self, inputs: dict[str, Any], layers: Sequence[int] = (), **wanted: Any) -> Output:
        """A forward over a few tokens per row.

        Args:
            inputs: arguments of the model, its cache included.
            layers: whose hidden states are wanted.
            wanted: what else the model's output should hold, as arguments of its forward.
        """
        with watch(self.model, layers) as hidden:
            output = self._on_few_rows(**inputs, **wanted, return_dict=True)
        return _output(output, hidden)

    def last_logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """A forward over a few tokens per row of which only the scores after the last are wanted: `[B, V]`."""
        return self.block(inputs, (), **last_logits_only(self.model)).logits[:, -1]

    def below(self, halves: Halves, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers below an exit, with final norm and LM head: logits `[B, n, V]`, hidden states `[B, n, d]`."""
        with halves.taken() as taken:
            output = halves.below(**inputs, **halves.quiet, return_dict=True)
        assert taken.hidden is not None
        return output.logits, taken.hidden

    def hidden_below(self, halves: Halves, inputs: dict[str, Any]) -> torch.Tensor:
        """The layers below an exit alone: the hidden states `[B, n, d]` that leave them."""
        with halves.taken() as taken:
            halves.below_headless(**inputs, **halves.quiet, return_dict=True)
        assert taken.hidden is not None
        return taken.hidden

    def above(self, halves: Halves, hidden: torch.Tensor, inputs: dict[str, Any], layers: Sequence[int] = ()) -> Output:
        """The layers above an exit, on hidden states `[B, n, d]` at it.

        Args:
            halves: the model in two halves.
            hidden: what left the layers below.
            inputs: arguments of the model.
            layers: whose hidden states are wanted, none of them below the exit.
        """
        with watch(self.model, [layer for layer in layers if layer != halves.exit_layer]) as seen, halves.given(hidden):
            output = halves.above(**inputs, **halves.quiet, return_dict=True)
        if halves.exit_layer in layers:
            seen[halves.exit_layer] = hidden
        return _output(output, seen)


def _output(output: Any, hidden: Mapping[int, torch.Tensor]) -> Output:
    return Output(
        logits=output.logits,
        hidden=hidden,
        hidden_states=output.get("decoder_hidden_states", output.get("hidden_states")),
        attentions=output.get("decoder_attentions", output.get("attentions")),
        cross_attentions=output.get("cross_attentions"),
    )
