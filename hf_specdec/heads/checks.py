"""What is checked of an adapter of draft heads: its base model, and its tensors by name, shape and value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import AdapterError
from .config import HeadConfig
from .output import lm_head_shape

_PROBES = 64
# cosine of two probes; a fine-tuned model stays close to its origin, another model is nowhere near
_SAME_MODEL = 0.9


def base_probe(model: Any) -> list[float] | None:
    """A few weights of a model's embedding, evenly spread, by which the model is known again."""
    weight = model.get_input_embeddings().weight
    if not weight.is_floating_point() or weight.device.type == "meta":
        return None
    flat = weight.detach().flatten()
    places = torch.arange(_PROBES, device=weight.device) * (flat.numel() - 1) // (_PROBES - 1)
    return [float(f"{value:.4g}") for value in flat[places].float().tolist()]


def check_base(config: HeadConfig, model: Any) -> None:
    """Raise `AdapterError` unless heads of these settings fit this model."""
    vocab_size, hidden_size = lm_head_shape(model)
    name, origin = type(model).__name__, config.base_model_name_or_path
    of = f" (they were made for {origin})" if origin else ""
    for what, wanted, found in (
        ("hidden size", config.hidden_size, hidden_size),
        ("vocabulary", config.vocab_size, vocab_size),
    ):
        if wanted is not None and wanted != found:
            raise AdapterError(f"These heads are for a {what} of {wanted}; {name} has {found}{of}.")
    if config.draft_vocab_size is not None and config.draft_vocab_size > vocab_size:
        raise AdapterError(
            f"These heads draft from {config.draft_vocab_size} tokens; {name} has only {vocab_size}{of}."
        )
    if config.output_rank is not None and config.output_rank > hidden_size:
        raise AdapterError(
            f"output_rank of these heads is {config.output_rank}; {name} has only a hidden size of {hidden_size}{of}."
        )
    probe = base_probe(model)
    if probe is None or config.base_probe is None:
        return
    wanted_probe = torch.tensor(config.base_probe, dtype=torch.float64)
    if len(probe) != len(wanted_probe):
        raise AdapterError(f"base_probe of these heads must hold {len(probe)} numbers, not {len(wanted_probe)}.")
    similarity = torch.cosine_similarity(wanted_probe, torch.tensor(probe, dtype=torch.float64), dim=0)
    if not float(similarity) >= _SAME_MODEL:
        raise AdapterError(
            f"These heads were trained on another model{of}: its embedding is not that of this {name} (cosine "
            f"{float(similarity):.2f}). Load them on their own base model, or train heads for this one."
        )


def check_shapes(shapes: dict[str, tuple[int, ...]], heads: nn.Module, adapter_name: str) -> None:
    """Raise `AdapterError` unless the tensors of such heads have these names and shapes."""
    expected = {key: tuple(tensor.shape) for key, tensor in heads.state_dict().items()}
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    problems = [f"{what} {_some(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    problems += [
        f"{key} is {list(shapes[key])}, not {list(shape)}"
        for key, shape in expected.items()
        if key in shapes and shapes[key] != shape
    ]
    if problems:
        raise AdapterError(f"The heads {adapter_name!r} do not hold what their config says: {'; '.join(problems)}.")


def check_floating(floating: dict[str, bool], adapter_name: str) -> None:
    """Raise `AdapterError` unless these tensors but the map hold floating-point numbers."""
    odd = [key for key, is_floating in floating.items() if key != "token_map" and not is_floating]
    if odd:
        raise AdapterError(
            f"The heads {adapter_name!r} hold weights that are no floating-point numbers (quantized?): {_some(odd)}."
        )


def check_tensors(loaded: dict[str, torch.Tensor], heads: nn.Module, config: HeadConfig, adapter_name: str) -> None:
    """Raise `AdapterError` unless these are the tensors of such heads, by name, shape and value."""
    check_shapes({key: tuple(tensor.shape) for key, tensor in loaded.items()}, heads, adapter_name)
    check_floating({key: tensor.is_floating_point() for key, tensor in loaded.items()}, adapter_name)
    check_finite(loaded, adapter_name)
    if "token_map" in loaded:
        _check_token_map(loaded["token_map"], lm_vocabulary=config.vocab_size or 0, adapter_name=adapter_name)


def _check_token_map(token_map: torch.Tensor, lm_vocabulary: int, adapter_name: str) -> None:
    if token_map.is_floating_point() or token_map.dtype == torch.bool:
        raise AdapterError(f"token_map of the heads {adapter_name!r} must hold whole numbers.")
    low, high = int(token_map.min()), int(token_map.max())
    if not 0 <= low <= high < lm_vocabulary:
        raise AdapterError(
            f"token_map of the heads {adapter_name!r} is broken or was never loaded: it names tokens {low} to {high}, "
            f"and the vocabulary has {lm_vocabulary}."
        )
    if token_map.unique().numel() != token_map.numel():
        raise AdapterError(f"token_map of the heads {adapter_name!r} names a token twice.")


def check_finite(tensors: dict[str, torch.Tensor], adapter_name: str) -> None:
    bad = [
        key for key, tensor in tensors.items() if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    if bad:
        raise AdapterError(
            f"The heads {adapter_name!r} hold values that are not finite in {_some(bad)}: they are broken, or were "
            "never loaded."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
