"""What transformers knows of a model and its config under private names."""

from __future__ import annotations

from typing import Any

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


def text_config(model: Any) -> Any:
    """The config of the part that decodes text."""
    return model.config.get_text_config(decoder=True)


def attention_of(config: Any) -> str:
    """Name of the attention back end that a config asks for."""
    return config._attn_implementation


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
