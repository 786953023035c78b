"""Draft heads as a PEFT method. The one file that touches the private seams of PEFT and of transformers' adapters.

The heads sit in a container beside the base model's own modules; nothing of the base model is replaced or wrapped. PEFT
and transformers load adapters leniently (what is missing stays random), so `install` puts a thin wrapper over both
`load_adapter`s: an adapter of draft heads is checked, and one that fails is taken out again. Two more give adapters
that are saved or pushed a model card with what was measured.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import peft
import torch
from jinja2 import TemplateError
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, PeftType, register_peft_method
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin
from transformers.utils import PushToHubMixin, cached_file, find_adapter_config_file
from transformers.utils.hub import DownloadKwargs

from ..errors import AdapterError
from .card import MARK, save_card
from .checks import base_probe, check_base, check_finite, check_floating, check_shapes, check_tensors
from .config import MedusaConfig
from .exit import BoundExit, TrainedExit
from .module import BoundHeads, MedusaHeads, lm_head_shape, start_outputs

_NAME = "MEDUSA"
# where the heads are in the base model. It must not start with the method's prefix: transformers would rename its keys
_CONTAINER, _HEADS = "spec_head_container", "medusa_heads"
# what stands before the names of the heads' tensors in `adapter_model.safetensors`
CHECKPOINT_PREFIX = f"base_model.model.{_CONTAINER}.{_HEADS}."


def _extend_enum() -> Any:
    """The member MEDUSA of PEFT's enum of methods, which has no door for methods from outside."""
    if _NAME in PeftType.__members__:
        return PeftType[_NAME]
    member: Any = str.__new__(PeftType, _NAME)
    member._name_ = member._value_ = _NAME
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType._member_names_)
    PeftType._member_names_.append(_NAME)
    PeftType._member_map_[_NAME] = member
    PeftType._value2member_map_[_NAME] = member
    type.__setattr__(PeftType, _NAME, member)
    return member


PEFT_TYPE = _extend_enum()


class HeadContainer(nn.Module, BaseTunerLayer):
    """Holds the heads of every adapter. A child of the base model that its forward never calls."""

    adapter_layer_names = (_HEADS,)
    other_param_names = ()
    _owner: Any
    _trainable: list[nn.Parameter]

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        self.medusa_heads = nn.ModuleDict()
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        object.__setattr__(self, "_owner", model)  # not as a submodule
        # PEFT freezes the base model; when the heads are gone it is as it was
        object.__setattr__(self, "_trainable", [weight for weight in model.parameters() if weight.requires_grad])

    def get_base_layer(self) -> Any:
        """The LM head: heads go where it is."""
        return self._owner.get_output_embeddings()

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raise: heads are no change of weights that could be merged."""
        raise AdapterError("Draft heads cannot be merged into the model's weights; use them as they are, or unload().")

    def unmerge(self) -> None:
        """Nothing was merged."""


class _HeadsAlone(dict):
    """What is saved of an adapter. PEFT would add the embeddings of a model whose vocabulary has been resized."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Base weights are never saved."""


class MedusaModel(BaseTuner):
    """Adds draft heads (`MedusaConfig`) to a causal language model; its forward stays what it was.

    Made by `get_peft_model`, `PeftModel.from_pretrained`, `AutoPeftModelForCausalLM.from_pretrained` or the
    `load_adapter` of transformers.

    Raises:
        AdapterError: the heads are for another model.
    """

    prefix = "medusa_"
    tuner_layer_cls = HeadContainer
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}  # type: ignore[misc]

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
        config = self.peft_config[adapter_name]
        assert isinstance(config, MedusaConfig)
        try:
            if not adapter_name or "." in adapter_name or hasattr(nn.ModuleDict, adapter_name):
                raise AdapterError(f"An adapter cannot be called {adapter_name!r}; choose another name.")
            check_base(config, model)
        except AdapterError:
            self.peft_config.pop(adapter_name)  # transformers would take it for loaded
            raise
        _add_heads(model, adapter_name, config)
        self._check_new_adapter_config(config)
        # `self.set_adapter` would turn off what other adapters keep in `modules_to_save`
        _container(model).set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        self._mark_only_adapters_as_trainable(model)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        return peft_config

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("draft heads replace no module")

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """float32 to be trained; for use, the dtype that the config asks for."""
        config = self.peft_config[adapter_name]
        if not config.inference_mode:
            super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        else:
            assert isinstance(config, MedusaConfig)
            _heads(self.model, adapter_name).to(_dtype(config, self.model))

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        _remove_if_empty(self.model)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            raise AdapterError(
                "Draft heads cannot be merged into the model's weights; use unload() to be without them."
            )
        for adapter_name in [name for name, config in self.peft_config.items() if isinstance(config, MedusaConfig)]:
            _take_out(self.model, adapter_name)
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
        prefix = (
            f"{'base_model.model.' if isinstance(model, peft.PeftModel) else ''}{_CONTAINER}.{_HEADS}.{adapter_name}."
        )
        heads = {f"{prefix}{key}": tensor for key, tensor in _heads(_base_of(model), adapter_name).state_dict().items()}
        return _HeadsAlone({key: state_dict.get(key, tensor) for key, tensor in heads.items()})

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # PEFT's own takes the name from the end of the key only
        return key.replace(f".{_HEADS}.{adapter_name}.", f".{_HEADS}.", 1)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        heads = _heads(_base_of(model), adapter_name)
        loaded = {_own_name(key): tensor for key, tensor in state_dict.items()}
        check_tensors(loaded, heads, config, adapter_name)
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


register_peft_method(name=_NAME.lower(), config_cls=MedusaConfig, model_cls=MedusaModel)


# ---------------------------------------------------------------- finding heads


def find_heads(model: Any, adapter: str | None = None) -> BoundHeads:
    """The heads of a model, those of the active adapter unless another is named.

    Raises:
        AdapterError: there are none, they are disabled, or they hold values that are not finite.
    """
    heads, config = _find(model, adapter, MedusaHeads, "Medusa heads")
    return BoundHeads(heads, config, model)


def find_exit(model: Any, adapter: str | None = None) -> BoundExit:
    """The trained exit of a model, that of the active adapter unless another is named. Raises as `find_heads`."""
    weights, config = _find(model, adapter, TrainedExit, "trained exit")
    return BoundExit(weights, config, model)


def has_exit(model: Any) -> bool:
    """Whether a model has a trained exit, sound or not, and its adapters are enabled."""
    container = getattr(model, _CONTAINER, None)
    if container is None or container.disable_adapters:
        return False
    return any(type(weights) is TrainedExit for weights in container.medusa_heads.values())


def _find(model: Any, adapter: str | None, kind: type, called: str) -> tuple[Any, MedusaConfig]:
    container = getattr(model, _CONTAINER, None)
    names = [] if container is None else [key for key, heads in container.medusa_heads.items() if type(heads) is kind]
    name = type(model).__name__
    if container is None or not names:
        raise AdapterError(
            f"{name} has no {called}. Load an adapter first: model.load_adapter('org/heads'), or "
            "PeftModel.from_pretrained(model, 'org/heads'); `hf-specdec train-heads` trains one."
        )
    if adapter is None:
        if container.disable_adapters:
            raise AdapterError(f"The adapters of {name} are disabled. Enable them, or name one: adapter={names[0]!r}.")
        active = [other for other in container.active_adapters if other in names]
        if not active and container.active_adapters and len(names) == 1:
            active = names  # the active one is of another kind
        if len(active) != 1:
            raise AdapterError(
                f"{name} has the adapters {', '.join(map(repr, names))}, and {len(active) or 'none'} of them active. "
                'Name one: speculative_config={"adapter": ...}.'
            )
        adapter = active[0]
    if adapter not in names:
        raise AdapterError(f"{name} has no {called} {adapter!r}, but {', '.join(map(repr, names))}.")
    heads, config = _heads(model, adapter), getattr(model, "peft_config", {}).get(adapter)
    if not isinstance(config, MedusaConfig):
        raise AdapterError(
            f"What {name} knows of the {called} {adapter!r} is gone: another adapter has taken that name, or was "
            "merged. Load the model anew, and each adapter under a name of its own."
        )
    with torch.no_grad():
        check_finite(dict(heads.named_parameters()), adapter)
        vocab_size, hidden_size = lm_head_shape(model)
        highest = -1 if heads.token_map is None else int(heads.token_map.max())
        if (config.own_lm_head or config.output_rank is not None) and heads.token_map is None:
            highest = (config.vocab_size or 0) - 1
    if config.hidden_size != hidden_size or highest >= vocab_size:
        raise AdapterError(
            f"The heads {adapter!r} draft tokens up to {highest} from a hidden size of {config.hidden_size}; {name} "
            f"has {vocab_size} tokens and {hidden_size} now. Load heads for the model as it is."
        )
    return heads, config


def _container(model: Any) -> HeadContainer:
    return getattr(model, _CONTAINER)


def _heads(model: Any, adapter_name: str) -> Any:
    return _container(model).medusa_heads[adapter_name]


def _base_of(model: Any) -> Any:
    """The transformers model in a `PeftModel`, or the model itself."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


# ---------------------------------------------------------------- making heads


def _add_heads(model: Any, adapter_name: str, config: MedusaConfig) -> None:
    vocab_size, hidden_size = lm_head_shape(model)
    config.hidden_size, config.vocab_size = hidden_size, vocab_size
    if config.base_probe is None and not config.inference_mode:
        config.base_probe = base_probe(model)
    heads = _new_heads(config, model)
    output = model.get_output_embeddings()
    if not config.inference_mode and output.weight.is_floating_point() and output.weight.device.type != "meta":
        start_outputs(heads, output.weight[: config.draft_vocab_size])
    if config.inference_mode:
        for weight in heads.parameters():
            nn.init.constant_(weight, math.nan)  # so that weights that are not loaded show
        if heads.token_map is not None:
            heads.token_map.fill_(-1)
    on_device = {} if next(heads.parameters()).device.type == "meta" else {"device": output.weight.device}
    heads.to(**on_device, dtype=_dtype(config, model)).train(model.training)
    if getattr(model, _CONTAINER, None) is None:
        model.add_module(_CONTAINER, HeadContainer(model))
    _container(model).medusa_heads[adapter_name] = heads


def _new_heads(config: MedusaConfig, model: Any) -> Any:
    vocab_size, hidden_size = lm_head_shape(model)
    if config.head_type == "exit":
        return TrainedExit(config, hidden_size, vocab_size)
    return MedusaHeads(config, hidden_size, model.get_input_embeddings().embedding_dim, vocab_size)


def _dtype(config: MedusaConfig, model: Any) -> torch.dtype:
    if config.dtype is not None:
        return getattr(torch, config.dtype)
    # a CPU multiplies a few rows of half precision at half the pace, or less
    on_cpu = model.device.type == "cpu"
    return torch.float32 if on_cpu and model.dtype in (torch.float16, torch.bfloat16) else model.dtype


# ---------------------------------------------------------------- loading, checked


def install() -> None:
    """Check adapters of draft heads wherever PEFT or transformers load them, and write cards for them. Idempotent."""
    for owner, name, wrapper in _WRAPPED:
        attribute, original = _method(owner, name)
        if not hasattr(original, "_specdec_wrapper"):
            wrapped: Any = functools.wraps(original)(wrapper(original))
            wrapped._specdec_wrapper, wrapped._specdec_original = wrapped, attribute
            setattr(owner, name, classmethod(wrapped) if isinstance(attribute, classmethod) else wrapped)


def uninstall() -> None:
    """Undo `install`."""
    for owner, name, _ in _WRAPPED:
        wrapped: Any = _method(owner, name)[1]
        if getattr(wrapped, "_specdec_wrapper", None) is wrapped:  # what others have put over it stays
            setattr(owner, name, vars(wrapped)["_specdec_original"])


def _method(owner: Any, name: str) -> tuple[Any, Any]:
    """A method as it stands in its class, and its function."""
    attribute = inspect.getattr_static(owner, name)
    return attribute, getattr(attribute, "__func__", attribute)


def _checked_by_peft(original: Callable) -> Any:
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        with _taken_out_on_failure(_base_of(self), adapter_name):
            return original(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _made_by_peft(original: Callable) -> Any:
    def from_pretrained(
        cls: Any, model: Any, model_id: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(getattr(model, "peft_config", {}).get(adapter_name), MedusaConfig):
            raise AdapterError(
                f"{type(model).__name__} has draft heads {adapter_name!r} already. Choose another name "
                "(adapter_name=...), or delete those first."
            )
        with _taken_out_on_failure(model, adapter_name):
            return original(cls, model, model_id, adapter_name, *args, **kwargs)

    return from_pretrained


def _checked_by_transformers(original: Callable) -> Any:
    signature = inspect.signature(original)

    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        name = arguments.get("adapter_name") or "default"
        _check_what_transformers_will_load(self, arguments, name)
        with _taken_out_on_failure(self, name):
            result = original(self, *args, **kwargs)
            config = getattr(self, "peft_config", {}).get(name)
            if isinstance(config, MedusaConfig):
                heads = _heads(self, name)
                check_tensors(heads.state_dict(), heads, config, name)
                heads.to(_dtype(config, self))
            return result

    return load_adapter


def _check_what_transformers_will_load(model: Any, arguments: dict[str, Any], adapter_name: str) -> None:
    """Look into the files before transformers does: it puts whatever it knows by name into the model, heads or not."""
    config, tensors = arguments.get("peft_config"), arguments.get("adapter_state_dict")
    load_config = arguments.get("load_config")
    download = {
        **(getattr(load_config, "download_kwargs", None) or {}),
        **{key: value for key, value in arguments.get("kwargs", {}).items() if key in DownloadKwargs.__annotations__},
        **(arguments.get("adapter_kwargs") or {}),
    }
    if arguments.get("local_files_only"):
        download["local_files_only"] = True
    source = arguments.get("peft_model_id") or getattr(load_config, "pretrained_model_name_or_path", None)
    if config is None and source is not None:
        file = find_adapter_config_file(str(source), **_known_to(find_adapter_config_file, download))
        if file is None or not _is_ours(file):
            return  # transformers' affair
        config = peft.PeftConfig.from_pretrained(str(source), **download)
    if not isinstance(config, MedusaConfig):
        return
    check_base(config, model)
    with torch.device("meta"):
        heads = _new_heads(config, model)
    if tensors is not None:
        check_tensors({_own_name(key): tensor for key, tensor in tensors.items()}, heads, config, adapter_name)
        return
    try:
        file = cached_file(str(source), SAFETENSORS_WEIGHTS_NAME, **download)
        with safe_open(file, "pt") as opened:
            slices = {_own_name(key): opened.get_slice(key) for key in list(opened.keys())}
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"The heads {adapter_name!r} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    check_shapes({key: tuple(tensor.get_shape()) for key, tensor in slices.items()}, heads, adapter_name)
    # as safetensors calls them: F32, BF16, F8_E4M3 and so on
    floating = {key: tensor.get_dtype().startswith(("F", "BF")) for key, tensor in slices.items()}
    check_floating(floating, adapter_name)


def _is_ours(config_file: str | Path) -> bool:
    try:
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("peft_type") == _NAME


def _own_name(key: str) -> str:
    """The name of one of the heads' tensors; of any other, all of it."""
    return key.removeprefix(CHECKPOINT_PREFIX).removeprefix(CHECKPOINT_PREFIX.removeprefix("base_model.model."))


def _known_to(function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}


def _with_our_card(original: Callable) -> Any:
    """For `PeftModel.save_pretrained`, which makes a card without content where there is none."""

    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        path = Path(output_dir) / "README.md"
        before = path.read_bytes() if path.exists() else None
        original(self, output_dir)
        config = self.active_peft_config
        if isinstance(config, MedusaConfig) and config.provenance:
            if before is not None and MARK.encode() in before:
                path.write_bytes(before)  # with the tags that PEFT has taken out
            _save_card(config, path, replace=before is None)

    return create_or_update_model_card


def _pushed_with_our_card(original: Callable) -> Any:
    """For `push_to_hub`, which replaces the card that was saved by the Hub's, or by one without content."""

    def _upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        folder = Path(working_dir)
        # adapters that are not called "default" are saved in folders of their names
        for file in (folder / CONFIG_NAME, *sorted(folder.glob(f"*/{CONFIG_NAME}"))):
            config = peft.PeftConfig.from_pretrained(str(file.parent)) if _is_ours(file) else None
            if isinstance(config, MedusaConfig) and config.provenance:
                subfolder = None if file.parent == folder else file.parent.name
                _save_card(config, folder / "README.md", repo_id, subfolder)
                break
        return original(self, working_dir, repo_id, *args, **kwargs)

    return _upload_modified_files


def _save_card(config: MedusaConfig, path: Path, *repo: str | None, replace: bool = False) -> None:
    try:
        save_card(config, path, *repo, replace=replace)
    except (TypeError, ValueError, AttributeError, TemplateError) as error:
        warnings.warn(f"The provenance of these heads makes no model card: {error}", stacklevel=4)


_WRAPPED: tuple[tuple[Any, str, Callable], ...] = (
    (PeftAdapterMixin, "load_adapter", _checked_by_transformers),
    (peft.PeftModel, "load_adapter", _checked_by_peft),
    (peft.PeftModel, "from_pretrained", _made_by_peft),
    (peft.PeftModel, "create_or_update_model_card", _with_our_card),
    (PushToHubMixin, "_upload_modified_files", _pushed_with_our_card),
)


@contextmanager
def _taken_out_on_failure(model: Any, adapter_name: str) -> Iterator[None]:
    """Leave the model as it was if loading an adapter of draft heads fails inside."""
    known = list(getattr(model, "peft_config", {}))
    attributes = set(vars(model))
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    modes = [(module, module.training) for module in model.modules()]
    active = [(module, module._active_adapter) for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        yield
    except BaseException as error:
        config = getattr(model, "peft_config", {}).get(adapter_name)
        if adapter_name in known or not isinstance(config, MedusaConfig):
            raise
        _take_out(model, adapter_name)
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


def _take_out(model: Any, adapter_name: str) -> None:
    container = getattr(model, _CONTAINER, None)
    if container is not None and adapter_name in container.medusa_heads:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about which adapter is active now
            container.delete_adapter(adapter_name)
    model.peft_config.pop(adapter_name, None)
    _remove_if_empty(model)
    if not model.peft_config:
        del model.peft_config
        vars(model).pop("_hf_peft_config_loaded", None)


def _remove_if_empty(model: Any) -> None:
    container = getattr(model, _CONTAINER, None)
    if container is not None and not container.medusa_heads:
        delattr(model, _CONTAINER)
        if not getattr(model, "peft_config", None):  # other adapters want the model frozen
            for weight in container._trainable:
                weight.requires_grad_(True)
