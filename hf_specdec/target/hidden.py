"""Hidden states of a model, seen by hooks for as long as a forward lasts, without asking the model for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..draft import LAST_HIDDEN, HiddenRequest
from ..errors import UnsupportedModelError
from ..host.models import execution_device, text_config
from ..host.modules import watching_hook
from ..memory import remembered, state_of
from ..sampling import forked_generators
from .layers import find_layers


@contextmanager
def watch(
    model: Any, layers: Sequence[int], positions: Sequence[int] | None = None, *, of_prompt: bool = False
) -> Iterator[dict[int, torch.Tensor]]:
    """Keep the hidden states of these layers in this thread's forward inside.

    Args:
        model: the model.
        layers: as `HiddenRequest` counts them.
        positions: kept of each forward, counted from its end; None keeps all.
        of_prompt: whether the LM head is given the last position alone, as `generate` has it in the prompts' forward.
            Then what it would be given is seen where it leaves the layers (see `check_hidden`).

    Yields:
        a dictionary that holds, after the forward, `[B, n, d]` by layer.

    Raises:
        UnsupportedModelError: the model has no such layer, or the forward did not call it as a module.
    """
    seen: dict[int, torch.Tensor] = {}
    hooks: list[RemovableHandle] = []
    try:
        for layer in layers:
            before_head = of_prompt and layer == LAST_HIDDEN and positions != (-1,)
            hooks.append(_watch_layer(model, layer, positions, seen, before_head))
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        if layer not in seen or seen[layer].dim() != 3:
            name = "LM head" if layer == LAST_HIDDEN else f"layer {layer}"
            raise UnsupportedModelError(
                f"{type(model).__name__} does not call its {name} as a module on one hidden state per token, so "
                "nothing can draft from it. Use another speculative_mode."
            )


def _watch_layer(
    model: Any, layer: int, positions: Sequence[int] | None, seen: dict[int, torch.Tensor], before_head: bool
) -> RemovableHandle:
    thread = get_ident()

    def keep(state: Any) -> None:
        if get_ident() != thread or not isinstance(state, torch.Tensor):  # other threads may be using the model
            return
        state = state.detach()
        if positions is not None and state.dim() == 3:
            state = state[:, [at for at in positions if -at <= state.shape[1]]]
        seen[layer] = state

    def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        # (another thread may call a hook that is just being put on without its keywords)
        keep(args[0] if args else next(iter((kwargs or {}).values()), None))

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        keep(output if isinstance(output, torch.Tensor) else output[0])

    if before_head:
        return watching_hook(model.base_model, keep_output)
    if layer == LAST_HIDDEN:
        output = model.get_output_embeddings()
        if not isinstance(output, nn.Module):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no LM head, so nothing can draft from what it is given. Use another "
                "speculative_mode."
            )
        return watching_hook(output, keep_input, before=True)
    _, modules = find_layers(model)
    if not 0 <= layer <= len(modules):
        raise UnsupportedModelError(f"{type(model).__name__} has {len(modules)} layers, so no hidden state {layer}.")
    if layer == 0:
        return watching_hook(modules[0], keep_input, before=True)
    return watching_hook(modules[layer - 1], keep_output)


def check_hidden(model: Any, request: HiddenRequest) -> None:
    """Raise `UnsupportedModelError` unless these hidden states can be read. Tested once per model and state."""
    layers, whole_prompt = {*request.layers, *request.of_prompt}, request.prompt_positions != (-1,)

    @torch.no_grad()
    def find() -> bool:
        ids = torch.full((1, 2), text_config(model).vocab_size // 3, device=execution_device(model))
        with (
            forked_generators(execution_device(model)),
            watch(model, sorted(layers)) as seen,
            watch(model, sorted(layers), None, of_prompt=whole_prompt) as of_prompt,
        ):
            shape = model(input_ids=ids, use_cache=False).logits.shape[:2]
        return all(state.shape[:2] == shape and torch.equal(state, of_prompt[layer]) for layer, state in seen.items())

    if layers and not remembered(model, "hidden", (*sorted(layers), whole_prompt, state_of(model)), find):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives its layers or its LM head something else than a hidden state per token. Use "
            "another speculative_mode."
        )
