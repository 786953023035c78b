"""What every forward after the prompts' is given besides text, mask and cache, asked of the model's own next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..errors import UnsupportedGenerationError
from ..host.generate import CACHE_KEY, planned_step
from ..host.models import argument_names

# types of tokens: those of new tokens follow from the last one of the prompt
_TYPES = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
# where images and videos lie in the prompt: what positions follow from, and of no use once those are given
_PLACES = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids"})
_SOURCE = "encoder_outputs"
# an encoder's mask; where there is no encoder, the text's mask has this name
_SOURCE_MASK = "attention_mask"
# settings of the forward, the same in every step
NUMBERS = (bool, int, float, str)


@dataclass(frozen=True)
class Extras:
    """Arguments that are the same for every token of a row.

    Args:
        constant: passed as they are, for instance an encoder's output; tensors are `[B, ...]`.
        types: `[B, 1]`, repeated for every token.
    """

    constant: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def source(self) -> Any | None:
        """What an encoder made of the source; None where there is no encoder."""
        return self.constant.get(_SOURCE)

    @property
    def source_mask(self) -> dict[str, Any]:
        """The argument that tells where the source has no padding; none where there is no encoder, or no mask."""
        return {_SOURCE_MASK: self.constant[_SOURCE_MASK]} if _SOURCE_MASK in self.constant else {}

    def arguments(self, width: int) -> dict[str, Any]:
        """Arguments of a forward over so many tokens per row."""
        return {**self.constant, **{name: types.expand(-1, width) for name, types in self.types.items()}}

    def of_rows(self, rows: Sequence[int]) -> Extras:
        """Those of a part of the batch."""
        constant, types = ({name: _of_rows(value, rows) for name, value in part.items()} for part in self._parts())
        return Extras(constant, types)

    def _parts(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return self.constant, self.types


def after_prompts(
    model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> tuple[Extras, torch.Tensor | None]:
    """What plain decoding's forwards after the prompts' would be given besides, and the positions of the first.

    Args:
        model: the model.
        input_ids: `[B, P]`, the prompts.
        model_kwargs: of the call, before the prompts' forward.

    Returns:
        the extras; positions `[B, 1]` or, where they have several dimensions, `[D, B, 1]`, None where none are given.

    Raises:
        UnsupportedGenerationError: an argument of the call is not the same for every token, or what the steps are given
            cannot be told before.
    """
    try:
        step = planned_step(model, input_ids, model_kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedGenerationError(
            f"What {type(model).__name__} gives its steps cannot be told before its prompt has run "
            f"({type(error).__name__}: {error}). Leave out speculative_mode, or pass on_unsupported='plain'."
        ) from error
    names = argument_names(model)
    known = {names.ids, names.mask, names.positions, CACHE_KEY, "use_cache", "return_dict", "logits_to_keep"}
    known |= {"output_attentions", "output_hidden_states", "inputs_embeds"}
    constant, types, unknown = {}, {}, []
    for name, value in step.items():
        if name in known or value is None:
            continue
        if name in _TYPES and isinstance(value, torch.Tensor) and value.shape == (input_ids.shape[0], 1):
            types[name] = value
        elif (name in (_SOURCE, _SOURCE_MASK) and model.config.is_encoder_decoder) or isinstance(value, NUMBERS):
            constant[name] = value
        elif name not in _PLACES or step.get(names.positions) is None:
            unknown.append(name)
    if unknown:
        raise UnsupportedGenerationError(
            f"speculative_mode cannot pass {', '.join(map(repr, unknown))} on to the model's later forwards. Leave the "
            "argument or speculative_mode out."
        )
    return Extras(constant, types), step.get(names.positions)


def _of_rows(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.index_select(0, torch.tensor(list(rows), device=value.device))
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _of_rows(entry, rows) for name, entry in value.items()})
    if isinstance(value, (tuple, list)):
        return tuple(_of_rows(entry, rows) for entry in value)
    return value
