"""What transformers knows of a model and its config under private names."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

# config entries about windows that say which layers have one, or how wide it is
WINDOW_ENTRIES = frozenset(
    {
        "sliding_window",
        "max_window_layers",
        "use_sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    }
)

_PLAIN = (bool, int, float, str, tuple)


def text_config(model: Any) -> Any:
    """The config of the part that decodes text."""
    return model.config.get_text_config(decoder=True)


def attention_of(config: Any) -> str:
    """Name of the attention back end that a config asks for."""
    return config._attn_implementation


@dataclass
class _Source(BaseModelOutput):
    """An encoder's output. Some encoders return a mask with it."""

    attention_mask: torch.Tensor | None = None


@dataclass(frozen=True)
class ArgumentNames:
    """What a model's forward calls what the text to be continued goes into."""

    ids: str
    mask: str
    positions: str


def argument_names(model: Any) -> ArgumentNames:
    """The names of the decoder's arguments."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    return ArgumentNames(f"{prefix}input_ids", f"{prefix}attention_mask", f"{prefix}position_ids")


def reads_source(model: Any) -> bool:
    """Whether the model's forward reads what an encoder made of a source: its own, or another model's."""
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


def source_width(model: Any) -> int:
    """Size of the hidden states of the encoder that the model reads."""
    return model.get_encoder().config.hidden_size if model.config.is_encoder_decoder else model.config.hidden_size


def encoded(states: torch.Tensor) -> dict[str, Any]:
    """The argument that hands a model what an encoder made of its source, hidden states `[B, S, d]`."""
    return {"encoder_outputs": _Source(last_hidden_state=states)}


def encode(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What later forwards of an encoder-decoder model are given of a source, after its encoder has read it."""
    encoder = model.get_encoder()
    parameters = inspect.signature(encoder.forward).parameters
    output = encoder(**{name: value for name, value in inputs.items() if name in parameters}, return_dict=True)
    mask = {name: value for name, value in inputs.items() if name == "attention_mask"}
    return {"encoder_outputs": output, **mask}


def made_up_source(model: Any, rows: int, length: int = 5) -> dict[str, Any]:
    """Arguments that stand for the output of an encoder, the same for every row."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, length, source_width(model), generator=generator, device="cpu", dtype=torch.float32)
    return encoded(states.to(execution_device(model), model.dtype).expand(rows, -1, -1))


def plain_settings(config: Any) -> tuple:
    """The entries of a config that are numbers, words, or lists of them."""
    entries = ((name, tuple(value) if isinstance(value, list) else value) for name, value in vars(config).items())
    return tuple((name, value) for name, value in entries if isinstance(value, _PLAIN) and _is_plain(value))


def _is_plain(value: Any) -> bool:
    return not isinstance(value, tuple) or all(isinstance(entry, (bool, int, float, str)) for entry in value)


def execution_device(model: Any) -> torch.device:
    """Where the model takes its inputs: not where accelerate keeps weights that it loads when they are needed."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    found = next((device for device in devices if device is not None), None)
    if found is None:
        return model.device
    return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)


def embedding_size(model: Any) -> int:
    """Number of tokens that the model has an embedding for."""
    words = model.get_input_embeddings()
    return int(getattr(words, "base_layer", words).weight.shape[0])  # (PEFT puts layers around it)


def takes_cache(model: Any) -> bool:
    """Whether the model keeps what it has read in a `Cache` of transformers."""
    return bool(model._supports_default_dynamic_cache())


def last_logits_only(model: Any) -> dict[str, int]:
    """The argument that spares a model the scores of all tokens but the last, where it takes it."""
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


def without_origin(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config without where its weights came from, and how they were stored there."""
    origin = ("quantization_config", "dtype", "torch_dtype", "_name_or_path", "_model_name_or_path")
    return {name: value for name, value in settings.items() if name not in origin}
