"""What the structure of a model tells about the part it can take: token trees, only chains, or nothing.

What structure does not tell, a self-test finds out (`selftest`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from ..host.generate import foreign_steps
from ..host.models import WINDOW_ENTRIES, attention_of, takes_cache, text_config
from ..host.peft_calls import asks_for_rows_or_offsets

# Attention back ends that read a dense 4-D mask, and the form each wants it in
DENSE_MASKS = {"eager": "additive", "sdpa": "boolean"}


@dataclass(frozen=True)
class MaskKind:
    """One mask of a forward: which layers read it."""

    # key in the mask dictionary; None where the model takes a single mask
    key: str | None
    # the layers that read this mask
    layers: tuple[int, ...]
    # keys further back than this are invisible; None for full attention
    window: int | None


@dataclass(frozen=True)
class Support:
    """How a model may be used. `why` says what stands against trees."""

    trees: bool
    # rows may keep different slots; otherwise they advance together
    movable: bool
    masks: tuple[MaskKind, ...]
    why: str | None = None
    # recurrent states are put back after a rejected draft, and the tokens that were kept are read again
    replays: bool = False


def check_structure(model: Any) -> None:
    """Raise `UnsupportedModelError` for models that cannot speculate, as far as their structure tells."""
    name = type(model).__name__
    remedy = "Use another model, leave out speculative_mode, or pass on_unsupported='plain'."
    prepares = vars(model).get("prepare_inputs_for_generation")
    if prepares is not None and getattr(prepares, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise UnsupportedModelError(
            f"prepare_inputs_for_generation of this {name} was replaced (PEFT's prompt and prefix tuning do so, to put "
            "tokens of their own before the prompt), so its later forwards cannot be made here. Leave out "
            "speculative_mode, or pass on_unsupported='plain'."
        )
    if not takes_cache(model):
        raise UnsupportedModelError(
            f"{name} keeps its state in an object of its own instead of a transformers `Cache`, so a rejected draft "
            f"cannot be rolled back. {remedy}"
        )
    if _drops_out(model):
        raise UnsupportedModelError(
            f"{name} is in training mode with dropout, so no two forwards agree. Call model.eval() first."
        )


def check_decoder_only(model: Any, why: str) -> None:
    """Raise `UnsupportedModelError` for encoder-decoder models, for what works with a decoder alone."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model, and {why}. Use speculative_mode='prompt_lookup', "
            "'lookahead' or 'assistant'."
        )


def check_steps(model: Any) -> None:
    """Raise `UnsupportedModelError` for a target whose steps in `generate` are given what drafted tokens cannot be."""
    name = type(model).__name__
    foreign = foreign_steps(model)
    if foreign:
        raise UnsupportedModelError(
            f"{name} has a {foreign[0]} of its own, which makes the inputs of every step and may give any of them what "
            "forwards over drafted tokens could not be given. Leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )
    asked_by = asks_for_rows_or_offsets(model)
    if asked_by is not None:
        raise UnsupportedModelError(
            f"This call uses {asked_by}, which PEFT applies to rows and positions of the prompts as they came; "
            "forwards over drafted tokens have others. Leave out speculative_mode, or pass on_unsupported='plain'."
        )


def _drops_out(model: Any) -> bool:
    """Whether a part of the model is in training mode and has dropout."""
    training = [module for module in model.modules() if module.training]
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in training):
        return True
    # dropout of attention is a number that its module reads; adapters beside the model's own modules do not
    own = model.training or any(type(module).__module__.split(".")[0] == "transformers" for module in training)
    return own and any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in vars(text_config(model)).items()
    )


def check_length(model: Any, shortest: int, longest: int) -> None:
    """Raise `UnsupportedModelError` where rotary frequencies change between these lengths of the text.

    They follow the deepest position of a whole forward, so tokens verified together would not get what each gets in a
    step of its own.
    """
    config = text_config(model)
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type")
        limit = getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = parameters.get("original_max_position_embeddings") or limit
            # past the border on both ends, all forwards use the same frequencies
            changes = limit is not None and shortest <= limit < longest
        else:
            changes = kind == "dynamic" and limit is not None and longest > limit
        if changes:
            raise UnsupportedModelError(
                f"{type(model).__name__} changes its {kind!r} rotary embedding at {limit} tokens, and this text may "
                f"reach {longest}. Keep prompt and new tokens below that, or pass on_unsupported='plain'."
            )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config, which may be nested per type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, dict):
        return []
    return [found, *(value for value in found.values() if isinstance(value, dict))]


def mask_kinds(config: Any) -> tuple[tuple[MaskKind, ...], str | None]:
    """The masks a forward of this model needs, or why its trees cannot be masked."""
    attention = attention_of(config)
    if attention not in DENSE_MASKS:
        return (), f"attention back end {attention!r} takes no dense mask"
    if getattr(config, "keep_window_size", None) is not None:
        raise UnsupportedModelError(
            f"Models of type {config.model_type} choose the keys they attend to by what else is scored with them, so a "
            "drafted block has other scores than single steps. Leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )
    foreign = [
        name
        for name, value in vars(config).items()
        if "window" in name and name not in WINDOW_ENTRIES and isinstance(value, int) and value
    ]
    if foreign:
        # such a window counts slots inside the model, and is wider than any text that the self-test could afford
        return (), f"a window that is not a sliding_window ({', '.join(foreign)})"
    everywhere = tuple(range(config.num_hidden_layers))
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            return (), "chunked attention"
        return (MaskKind(None, everywhere, window),), None
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        return (), f"layers of type {', '.join(sorted(map(str, unknown)))}"
    kinds = tuple(
        MaskKind(
            kind,
            tuple(index for index, other in enumerate(types) if other == kind),
            window if kind == "sliding_attention" else None,
        )
        for kind in sorted(set(types))
    )
    if len(kinds) == 1:
        return (MaskKind(None, everywhere, kinds[0].window),), None
    return kinds, None
