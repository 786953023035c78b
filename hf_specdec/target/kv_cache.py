"""Commit and rollback: with `recurrent.py` the only file that touches the layers of a transformers KV cache.

After a forward over a block of n nodes the cache holds n new slots for every row. `commit` keeps the slots of each
row's accepted path, in order, and drops the rest. Rows that keep fewer than the longest leave a hole, or are shifted
to the right so that the hole becomes left padding.

Layers of shape keys, values: [B, heads, slots, head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..errors import UnsupportedCacheError
from ..host.caches import DummyLayer, IndexedLayer, LinearAttentionLayer, RecordingWindowLayer
from .recurrent import holds_all_keys, keeps_states

# Layers whose slots this file knows how to move. Subclasses may keep more state, so they do not count.
_MOVABLE = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    RecordingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    DummyLayer,
)


def of_text(cache: Any) -> Cache:
    """The part of a cache that holds the text; the other, with the keys of an encoder's output, stays as it is."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _layers(cache: Cache) -> list[Any]:
    return of_text(cache).layers


def check_kind(cache: object) -> None:
    """Raise `UnsupportedCacheError` for caches that cannot be rolled back, before the model runs."""
    if not isinstance(cache, Cache):
        raise UnsupportedCacheError(
            f"Speculative decoding needs a transformers `Cache`, got {type(cache).__name__}. Remove the `cache` "
            "(`past_key_values`) argument, or pass a `DynamicCache`."
        )
    cache = of_text(cache)
    if isinstance(cache, QuantizedCache):
        raise UnsupportedCacheError(
            f"{type(cache).__name__} cannot drop tokens once they are quantized, so drafts cannot be rolled back. "
            "Use cache_implementation='dynamic' or 'static'."
        )
    if getattr(cache, "offloading", False):
        raise UnsupportedCacheError(
            "An offloaded cache moves its layers while the model runs and cannot be rolled back. Use "
            "cache_implementation='dynamic' or 'static'."
        )


def check_rollback(cache: Cache, model_name: str, total_slots: int) -> None:
    """Raise `UnsupportedCacheError` where `crop` could not undo a forward within the first `total_slots` slots.

    Layers with a convolution or recurrent state only know what they are after a first forward.
    """
    for index, layer in enumerate(_layers(cache)):
        if isinstance(layer, StaticSlidingWindowLayer):
            # slots are overwritten once the window is full; until then they can be dropped
            croppable = layer.max_cache_len >= total_slots
        elif type(layer) is StaticLayer or keeps_states(layer) or _never_ran(layer):
            croppable = True
        elif type(layer) not in (*_MOVABLE, LinearAttentionLayer, IndexedLayer):
            croppable = False  # it may hold more than keys, values and a convolution
        else:
            croppable = bool(getattr(layer, "is_croppable", False))
        if not croppable:
            raise UnsupportedCacheError(
                f"Layer {index} of the cache of {model_name} is a {type(layer).__name__}, which cannot drop tokens "
                "again (it holds a state of its own, quantized keys, or a full static window). Use "
                "cache_implementation='dynamic', another model, or on_unsupported='plain'."
            )


def record_past(cache: Cache, on: bool) -> None:
    """Let sliding windows keep what a rollback needs until the next commit, or stop doing so."""
    for layer in _layers(cache):
        if keeps_states(layer) or _never_ran(layer):
            continue  # what cannot be recorded is copied (see `recurrent`)
        if type(layer) in (DynamicSlidingWindowLayer, RecordingWindowLayer):
            # the same layer, by a class that may record over several forwards (see `host.caches`)
            layer.__class__ = RecordingWindowLayer if on else DynamicSlidingWindowLayer
        if hasattr(layer, "record_past"):
            layer.record_past = on


def _never_ran(layer: Any) -> bool:
    """Whether a layer with convolution or recurrent states has none, as where only a part of the model runs."""
    return type(layer) is LinearAttentionLayer and not any(layer.is_conv_states_initialized.values())


def is_movable(cache: Cache) -> bool:
    """Whether slots can be moved within the cache; otherwise only the last ones can be dropped."""
    return all(type(layer) in _MOVABLE for layer in _layers(cache))


def has_windows(cache: Cache) -> bool:
    """Whether a layer counts its window in slots, so that holes would push out keys that are still visible."""
    return any(getattr(layer, "is_sliding", False) for layer in _layers(cache))


def capacity(cache: Cache) -> int | None:
    """Slots a static cache has in all; None where the cache grows."""
    lengths = [layer.max_cache_len for layer in _layers(cache) if isinstance(layer, StaticLayer)]
    return min(lengths) if lengths else None


def slots(cache: Cache) -> int:
    """Slots in use; 0 where no layer has keys."""
    try:
        return int(cache.get_seq_length())
    except ValueError:  # recurrent layers only
        return 0


def mask_size(cache: Cache, layer_index: int, width: int) -> tuple[int, int]:
    """(keys that attention will see in a forward over `width` tokens, slot number of the first of them)."""
    return cache.get_mask_sizes(width, layer_index)


def crop(cache: Cache, tokens: int) -> None:
    """Drop the last `tokens` slots of every row; trim sliding windows to their size. States stay as they are."""
    for layer in _layers(cache):
        if not getattr(layer, "is_initialized", True) or _never_ran(layer):
            continue  # a part of a model has layers that never run
        if isinstance(layer, StaticLayer):
            _shorten(layer, tokens)
        elif holds_all_keys(layer):
            DynamicLayer.crop(layer, -tokens)  # type: ignore[arg-type]
        elif not keeps_states(layer):
            layer.crop(-tokens)  # type: ignore[union-attr]


def drop_last(cache: Cache, tokens: int, layers: int) -> None:
    """Drop the last `tokens` slots of the first `layers` layers. Sliding windows keep what they have recorded."""
    for layer in _stored(cache, layers) if tokens else ():
        if not isinstance(layer, StaticLayer):
            layer.keys, layer.values = layer.keys[:, :, :-tokens], layer.values[:, :, :-tokens]
        if hasattr(layer, "cumulative_length"):
            _shorten(layer, tokens)


def gather_block(cache: Cache, width: int, nodes: torch.Tensor, layers: int | None = None) -> None:
    """Move the block's nodes `nodes [B, m]` to its first m slots; the others are still to be dropped.

    Only in the first `layers` layers, where a number is given.
    """
    kept = nodes.shape[1]
    for layer in _stored(cache, layers):
        for tensor in (layer.keys, layer.values):
            end = int(layer.cumulative_length) if isinstance(layer, StaticLayer) else tensor.shape[-2]
            block = tensor[:, :, end - width : end]
            index = nodes.to(tensor.device)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[-1])
            block[:, :, :kept] = block.gather(2, index)


def realign(cache: Cache, source: torch.Tensor, total: int) -> None:
    """Rebuild every row from the slots `source [B, total]`, counted as they are now."""
    before = slots(cache)
    for layer in _stored(cache):
        if isinstance(layer, StaticLayer):
            storage: list[Any] = [layer.keys, layer.values]
            for tensor in storage:
                tensor[:, :, :total] = _gather_slots(tensor, source)
            _shorten(layer, before - total)
            continue
        first = before - layer.keys.shape[-2]  # slot number of the oldest slot this layer still holds
        window = layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else total
        local = source[:, max(0, total - window) :] - first
        layer.keys, layer.values = _gather_slots(layer.keys, local), _gather_slots(layer.values, local)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = total


def select_rows(cache: Cache, rows: Sequence[int]) -> None:
    """Keep only these rows of the batch, of an encoder's output as well."""
    stored = _stored(cache)
    if isinstance(cache, EncoderDecoderCache):
        stored += _stored(cache.cross_attention_cache)
    for layer in stored:
        index = torch.tensor(list(rows), device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)


def _shorten(layer: Any, tokens: int) -> None:
    """Let a layer that counts its slots have so many fewer."""
    layer.cumulative_length -= tokens  # in place where it is a tensor, whose address matters
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int -= tokens


def _stored(cache: Cache, layers: int | None = None) -> list[Any]:
    stored: list[Any] = _layers(cache)[:layers]
    return [layer for layer in stored if not isinstance(layer, DummyLayer) and layer.is_initialized]


def _gather_slots(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`tensor [B, heads, slots, dim]` at slots `source [B, m]`; what a window no longer holds was padding."""
    index = source.to(tensor.device).clamp(min=0)[:, None, :, None]
    return tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[-1]))


def new_cache(config: object, *, with_source: bool = False) -> Cache:
    """An empty growing cache for a model's text config, ready to roll back several forwards at once.

    Args:
        config: of the part that decodes.
        with_source: whether the model reads an encoder's output as well.
    """
    cache = DynamicCache(config=config)  # type: ignore[arg-type]
    record_past(cache, True)
    return EncoderDecoderCache(cache, DynamicCache(config=config)) if with_source else cache  # type: ignore[arg-type]


def count_layers(cache: Cache) -> int:
    """Number of layers of the part that decodes."""
    return len(_layers(cache))


def window(cache: Cache, layer_index: int) -> int | None:
    """Size of a growing layer's sliding window; None where it sees everything."""
    layer = _layers(cache)[layer_index]
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
