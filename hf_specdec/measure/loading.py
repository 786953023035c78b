"""Models, tokenizers and adapters by name, with errors that say what is missing."""

from __future__ import annotations

import copy
from typing import Any

from .._version import __version__
from ..errors import ConfigurationError, InvalidSettingError, SpeculationError, UnsupportedModelError
from .report import Environment


def load_model(name: str, dtype: str = "float32", device: str = "cpu") -> Any:
    """A causal language model from a folder or the Hub, ready to generate.

    Raises:
        ConfigurationError: there is none of this name.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot load the model {name!r}: {error}") from error
    return model.to(device).eval()


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, padding on the left as generating needs it.

    Raises:
        ConfigurationError: there is none of this name.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot load the tokenizer of {name!r}: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_adapter(model: Any, name: str) -> None:
    """Load an adapter from a folder or the Hub into a model.

    Raises:
        ConfigurationError: there is none of this name.
        AdapterError: it holds draft heads that are broken, or another model's.
    """
    try:
        model.load_adapter(name)
    except SpeculationError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot load the adapter {name!r}: {error}") from error


def first_layers(model: Any, layers: int) -> Any:
    """A draft model made of `model`'s embeddings, first `layers` layers, final norm and head; it shares the weights.

    Raises:
        InvalidSettingError: the model does not have more layers than that.
        UnsupportedModelError: the model is not built like Llama's.
    """
    import torch

    inner = getattr(model, "model", None)
    if not all(hasattr(inner, part) for part in ("embed_tokens", "layers", "norm")) or not hasattr(model, "lm_head"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not built like Llama (model.embed_tokens, model.layers, model.norm, lm_head), "
            "so no draft model can be cut out of it. Use a draft model of its own."
        )
    assert inner is not None
    if not 1 <= layers < len(inner.layers):
        raise InvalidSettingError(
            f"A draft model of the model's own layers has between 1 and {len(inner.layers) - 1} of them, got {layers}."
        )
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):  # no memory for weights that are replaced at once
        draft = type(model)(config)
    for name, part in inner.named_children():
        setattr(draft.model, name, part[:layers] if name == "layers" else part)
    draft.lm_head = model.lm_head
    if any(tensor.is_meta for tensor in [*draft.parameters(), *draft.buffers()]):
        raise UnsupportedModelError(
            f"{type(model).__name__} has weights outside of its layers, embeddings, norm and head, so no draft model "
            "can be cut out of it. Use a draft model of its own."
        )
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def describe(model: Any, name: str, assistant: str | None = None) -> Environment:
    """What is run on what."""
    import torch
    import transformers

    device = model.device
    return Environment(
        model=name,
        assistant=assistant,
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        hf_specdec=__version__,
    )
