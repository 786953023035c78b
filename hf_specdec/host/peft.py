"""Draft heads as a PEFT method, as far as PEFT's and transformers' private names are concerned.

Heads of every kind sit in one container beside the base model's own modules; nothing of the base model is replaced or
wrapped. Which networks they are, and what is checked of them, `HeadTuner` leaves to its subclasses.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import PeftType, register_peft_method
from torch import nn

from ..errors import AdapterError, ConfigurationError

# where heads are in the base model. The name must not contain a method's prefix: transformers would rename its keys
_CONTAINER = "spec_head_container"
# what PEFT puts before every key of a checkpoint
_PEFT_PREFIX = "base_model.model."


# ---------------------------------------------------------------- types of adapters


def peft_type(name: str) -> Any:
    """The member of PEFT's enum of methods of this name. It is added: the enum has no door for others' methods.

    Raises:
        ConfigurationError: no adapter type can be called so.
    """
    if name in PeftType.__members__:
        return PeftType[name]
    if not name.isidentifier() or not name.isupper() or name.endswith("_") or f"{name.lower()}_" in _CONTAINER:
        raise ConfigurationError(
            f"An adapter type cannot be called {name!r}; choose a name of capital letters that is no part of "
            f"{_CONTAINER.upper()}."
        )
    member: Any = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType._member_names_)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)
    return member


def register_type(name: str, config: type, tuner: type[HeadTuner]) -> None:
    """Let PEFT and transformers load adapters of the type `name`, once.

    Raises:
        ConfigurationError: PEFT has a method of this name already.
    """
    known = PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type(name))
    if known is None:
        register_peft_method(name=name.lower(), config_cls=config, model_cls=tuner)
    elif known is not tuner:
        raise ConfigurationError(f"PEFT has an adapter type {name!r} already; choose another name.")


def tuner_of(name: str) -> type[HeadTuner] | None:
    """The tuner that was registered for an adapter type of draft heads."""
    tuners: Any = PEFT_TYPE_TO_TUNER_MAPPING
    tuner = tuners.get(name)
    return tuner if isinstance(tuner, type) and issubclass(tuner, HeadTuner) else None


def is_head_config(config: Any) -> bool:
    """Whether this is the PEFT config of draft heads."""
    return isinstance(config, peft.PeftConfig) and tuner_of(str(getattr(config.peft_type, "value", ""))) is not None


def checkpoint_prefix(name: str) -> str:
    """What stands before the names of tensors in `adapter_model.safetensors` of the adapter type `name`."""
    return f"{_PEFT_PREFIX}{_CONTAINER}.{_heads_name(name)}."


def own_name(key: str, name: str) -> str:
    """The name that heads of the adapter type `name` give the tensor of a checkpoint's key; of any other, the key."""
    prefix = checkpoint_prefix(name)
    return key.removeprefix(prefix).removeprefix(prefix.removeprefix(_PEFT_PREFIX))


def _heads_name(name: str) -> str:
    # transformers knows keys of adapters by the adapter type in them
    return f"{name.lower()}_heads"


# ---------------------------------------------------------------- heads in a model


class HeadContainer(nn.Module, BaseTunerLayer):
    """Holds the heads of every adapter. A child of the base model that its forward never calls."""

    other_param_names = ()
    _owner: Any
    _trainable: list[nn.Parameter]

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        object.__setattr__(self, "_owner", model)  # not as a submodule
        # PEFT freezes the base model; when the heads are gone it is as it was
        object.__setattr__(self, "_trainable", [weight for weight in model.parameters() if weight.requires_grad])

    @property
    def adapter_layer_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """One `ModuleDict` per adapter type: name of an adapter -> its heads."""
        return tuple(self._modules)

    def heads(self, name: str | None = None) -> dict[str, nn.Module]:
        """Name of an adapter -> its heads, of one adapter type or of all."""
        kinds = self.adapter_layer_names if name is None else (_heads_name(name),)
        found: Any = [self._modules.get(kind, nn.ModuleDict()) for kind in kinds]
        return {adapter: heads for kind in found for adapter, heads in kind.items()}

    def add(self, name: str, adapter_name: str, heads: nn.Module) -> None:
        """Put in an adapter of the adapter type `name`."""
        kind = _heads_name(name)
        if kind not in self._modules:
            self.add_module(kind, nn.ModuleDict())
        getattr(self, kind)[adapter_name] = heads

    def get_base_layer(self) -> Any:
        """The LM head: heads go where it is."""
        return self._owner.get_output_embeddings()

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raise: heads are no change of weights that could be merged."""
        raise AdapterError("Draft heads cannot be merged into the model's weights; use them as they are, or unload().")

    def unmerge(self) -> None:
        """Nothing was merged."""


def container_of(model: Any) -> HeadContainer | None:
    """What holds a model's draft heads; None where it has none."""
    return getattr(model, _CONTAINER, None)


def heads_of(model: Any, adapter_name: str) -> Any:
    """The heads of an adapter. Raises `KeyError` where there are none of this name."""
    container = container_of(model)
    return ({} if container is None else container.heads())[adapter_name]


def base_of(model: Any) -> Any:
    """The transformers model in a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


class _HeadsAlone(dict):
    """What is saved of an adapter. PEFT would add the embeddings of a model whose vocabulary has been resized."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Base weights are never saved."""


class HeadTuner(BaseTuner):
    """Adds draft heads to a causal language model; its forward stays what it was.

    Subclasses say what heads are: `check_base`, `new_heads`, `check_tensors` and `dtype_of`.

    Raises:
        AdapterError: the heads are for another model.
    """

    prefix: str
    tuner_layer_cls = HeadContainer
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}  # type: ignore[misc]

    # ------------------------------------------------------------------ what subclasses say

    @classmethod
    def check_base(cls, config: Any, model: Any) -> None:
        """Raise `AdapterError` unless heads of these settings fit this model."""
        raise NotImplementedError

    @classmethod
    def new_heads(cls, config: Any, model: Any) -> nn.Module:
        """New heads for a model, in their place and dtype."""
        raise NotImplementedError

    @classmethod
    def check_tensors(cls, tensors: dict[str, torch.Tensor], heads: nn.Module, config: Any, adapter_name: str) -> None:
        """Raise `AdapterError` unless these are the tensors of such heads."""
        raise NotImplementedError

    @classmethod
    def dtype_of(cls, config: Any, model: Any) -> torch.dtype:
        """The dtype in which heads of these settings draft."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what PEFT asks

    def __init__(self, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, peft.PeftModel):
            raise AdapterError(
                "Draft heads go beside the model's own modules, and this is a PeftModel around them. Pass its "
                "get_base_model(), in which its adapters stay active, and another adapter_name than theirs."
            )
        if adapter_name in getattr(model, "peft_config", {}):
            raise AdapterError(
                f"{type(model).__name__} has an adapter {adapter_name!r} already. Choose another name "
                "(adapter_name=...), or delete that one first."
            )
        with warnings.catch_warnings():
            # a second adapter beside the first is what several names are for
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            super().__init__(model, peft_config, adapter_name, *args, **kwargs)

    def inject_adapter(
        self,
        model: Any,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Put new heads into the model."""
        config: Any = self.peft_config[adapter_name]
        try:
            if not adapter_name or "." in adapter_name or hasattr(nn.ModuleDict, adapter_name):
                raise AdapterError(f"An adapter cannot be called {adapter_name!r}; choose another name.")
            self.check_base(config, model)
            heads = self.new_heads(config, model)
        except AdapterError:
            self.peft_config.pop(adapter_name)  # transformers would take it for loaded
            raise
        container = container_of(model)
        if container is None:
            container = HeadContainer(model)
            model.add_module(_CONTAINER, container)
        container.add(config.peft_type.value, adapter_name, heads)
        self._check_new_adapter_config(config)
        # `self.set_adapter` would turn off what other adapters keep in `modules_to_save`
        container.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        self._mark_only_adapters_as_trainable(model)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        return peft_config

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("draft heads replace no module")

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """float32 to be trained; for use, the dtype that the config asks for."""
        config = self.peft_config[adapter_name]
        if config.inference_mode:
            heads_of(self.model, adapter_name).to(self.dtype_of(config, self.model))
        else:
            super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)

    def delete_adapter(self, adapter_name: str) -> None:
        """Take out the heads of an adapter."""
        super().delete_adapter(adapter_name)
        _remove_if_empty(self.model)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            raise AdapterError(
                "Draft heads cannot be merged into the model's weights; use unload() to be without them."
            )
        for adapter_name in [name for name, config in self.peft_config.items() if is_head_config(config)]:
            take_out(self.model, adapter_name)
        return self.model

    # ------------------------------------------------------------------ keys of the checkpoint

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: Any,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        # PEFT leaves out keys with another adapter's name between two dots, and `heads` or `0` may be such a name
        prefix = f"{checkpoint_prefix(config.peft_type.value)}{adapter_name}."
        if not isinstance(model, peft.PeftModel):
            prefix = prefix.removeprefix(_PEFT_PREFIX)
        heads = heads_of(base_of(model), adapter_name).state_dict()
        return _HeadsAlone({f"{prefix}{key}": state_dict.get(f"{prefix}{key}", heads[key]) for key in heads})

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # PEFT's own takes the name from the end of the key only
        heads = f".{cls.prefix}heads."
        return key.replace(f"{heads}{adapter_name}.", heads, 1)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        name = config.peft_type.value
        loaded = {own_name(key, name): tensor for key, tensor in state_dict.items()}
        cls.check_tensors(loaded, heads_of(base_of(model), adapter_name), config, adapter_name)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


# ---------------------------------------------------------------- taking heads out again


def take_out(model: Any, adapter_name: str) -> None:
    """Remove an adapter of draft heads, and whatever the model had only for it."""
    container = container_of(model)
    if container is not None and adapter_name in container.heads():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about which adapter is active now
            container.delete_adapter(adapter_name)
    model.peft_config.pop(adapter_name, None)
    _remove_if_empty(model)
    if not model.peft_config:
        del model.peft_config
        vars(model).pop("_hf_peft_config_loaded", None)


def _remove_if_empty(model: Any) -> None:
    container = container_of(model)
    if container is None:
        return
    for kind in container.adapter_layer_names:
        if not getattr(container, kind):
            delattr(container, kind)
    if not container.heads():
        delattr(model, _CONTAINER)
        if not getattr(model, "peft_config", None):  # other adapters want the model frozen
            for weight in container._trainable:
                weight.requires_grad_(True)


@contextmanager
def unchanged_on_failure(model: Any, adapter_name: str) -> Iterator[None]:
    """Leave the model as it was if loading an adapter of draft heads fails inside.

    Raises:
        AdapterError: whatever else was raised inside.
    """
    known = list(getattr(model, "peft_config", {}))
    attributes = set(vars(model))
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    modes = [(module, module.training) for module in model.modules()]
    active = [(module, module._active_adapter) for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        yield
    except BaseException as error:
        config = getattr(model, "peft_config", {}).get(adapter_name)
        if adapter_name in known or not is_head_config(config):
            raise
        take_out(model, adapter_name)
        for attribute in set(vars(model)) - attributes:
            delattr(model, attribute)
        for module, training in modes:
            module.training = training
        if known:  # another adapter is active now, and may be trained
            for module, names in active:
                module._active_adapter = names
            for name, weight in model.named_parameters():
                weight.requires_grad_(trained[name])
        if isinstance(error, AdapterError) or not isinstance(error, Exception):
            raise
        raise AdapterError(
            f"The heads {adapter_name!r} could not be loaded: {type(error).__name__}: {error}"
        ) from error
