"""Loading adapters of draft heads, checked: one that fails leaves the model as it was.

PEFT and transformers load leniently: what is missing stays random, and what is known by name is put into the model,
heads or not. These functions stand in for their methods (see `install.WRAPPED`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ..errors import AdapterError
from ..host.hub import download_arguments, find_adapter_config
from ..host.peft import base_of, heads_of, is_head_config, own_name, tuner_of, unchanged_on_failure
from .checks import check_floating, check_shapes
from .kind import kind_of


def load_by_peft(original: Callable, peft_model: Any, model_id: Any, adapter_name: str, *args: Any, **kw: Any) -> Any:
    """In place of `PeftModel.load_adapter`."""
    with unchanged_on_failure(base_of(peft_model), adapter_name):
        return original(peft_model, model_id, adapter_name, *args, **kw)


def make_by_peft(
    original: Callable, cls: Any, model: Any, model_id: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
) -> Any:
    """In place of `PeftModel.from_pretrained`."""
    if is_head_config(getattr(model, "peft_config", {}).get(adapter_name)):
        raise AdapterError(
            f"{type(model).__name__} has draft heads {adapter_name!r} already. Choose another name "
            "(adapter_name=...), or delete those first."
        )
    with unchanged_on_failure(model, adapter_name):
        return original(cls, model, model_id, adapter_name, *args, **kwargs)


def load_by_transformers(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """In place of the `load_adapter` of transformers' models."""
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    name = arguments.get("adapter_name") or "default"
    _check_what_will_be_loaded(model, arguments, name)
    with unchanged_on_failure(model, name):
        result = original(model, *args, **kwargs)
        config = getattr(model, "peft_config", {}).get(name)
        if is_head_config(config):
            heads, tuner = heads_of(model, name), _tuner(config)
            tuner.check_tensors(heads.state_dict(), heads, config, name)
            heads.to(tuner.dtype_of(config, model))
        return result


def _check_what_will_be_loaded(model: Any, arguments: dict[str, Any], adapter_name: str) -> None:
    """Look into the files before transformers does: it puts whatever it knows by name into the model, heads or not."""
    config: Any = arguments.get("peft_config")
    tensors = arguments.get("adapter_state_dict")
    load_config = arguments.get("load_config")
    download = {
        **(getattr(load_config, "download_kwargs", None) or {}),
        **download_arguments(arguments.get("kwargs", {})),
        **(arguments.get("adapter_kwargs") or {}),
    }
    if arguments.get("local_files_only"):
        download["local_files_only"] = True
    source = arguments.get("peft_model_id") or getattr(load_config, "pretrained_model_name_or_path", None)
    if config is None and source is not None:
        file = find_adapter_config(str(source), download)
        if file is None or not describes_heads(file):
            return  # transformers' affair
        config = PeftConfig.from_pretrained(str(source), **download)
    if not is_head_config(config):
        return
    _tuner(config).check_base(config, model)
    with torch.device("meta"):
        heads = kind_of(config).network(config, model)
    type_name = str(config.peft_type.value)
    if tensors is not None:
        named = {own_name(key, type_name): tensor for key, tensor in tensors.items()}
        _tuner(config).check_tensors(named, heads, config, adapter_name)
        return
    try:
        file = cached_file(str(source), SAFETENSORS_WEIGHTS_NAME, **download)
        with safe_open(file, "pt") as opened:
            slices = {own_name(key, type_name): opened.get_slice(key) for key in list(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"The heads {adapter_name!r} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    check_shapes({key: tuple(tensor.get_shape()) for key, tensor in slices.items()}, heads, adapter_name)
    # as safetensors calls them: F32, BF16, F8_E4M3 and so on
    floating = {key: tensor.get_dtype().startswith(("F", "BF")) for key, tensor in slices.items()}
    check_floating(floating, adapter_name)


def _tuner(config: Any) -> Any:
    return tuner_of(str(config.peft_type.value))


def describes_heads(config_file: str | Path) -> bool:
    """Whether an `adapter_config.json` is one of draft heads."""
    try:
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and tuner_of(str(config.get("peft_type"))) is not None
