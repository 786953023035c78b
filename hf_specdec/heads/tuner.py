"""The PEFT method behind every kind of draft heads, and how a kind is registered."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn

from ..host.peft import HeadTuner, register_type
from .checks import base_probe, check_base, check_tensors
from .config import HeadConfig
from .kind import HeadKind, add_kind, kind_of
from .output import HeadNetwork, lm_head_shape


class KindTuner(HeadTuner):
    """Adds draft heads of a registered kind to a causal language model; its forward stays what it was.

    Made by `get_peft_model`, `PeftModel.from_pretrained`, `AutoPeftModelForCausalLM.from_pretrained` or the
    `load_adapter` of transformers. There is a subclass for every adapter type.

    Raises:
        AdapterError: the heads are for another model.
    """

    @classmethod
    def check_base(cls, config: Any, model: Any) -> None:
        check_base(config, model)
        kind_of(config).check_base(config, model)

    @classmethod
    def new_heads(cls, config: Any, model: Any) -> HeadNetwork:
        config.vocab_size, config.hidden_size = lm_head_shape(model)
        if config.base_probe is None and not config.inference_mode:
            config.base_probe = base_probe(model)
        heads = kind_of(config).network(config, model)
        output = model.get_output_embeddings()
        if config.inference_mode:
            for weight in heads.parameters():
                nn.init.constant_(weight, math.nan)  # so that weights that are not loaded show
            if heads.token_map is not None:
                heads.token_map.fill_(-1)
        elif output.weight.is_floating_point() and output.weight.device.type != "meta":
            heads.start_outputs(output.weight[: config.draft_vocab_size])
        on_device = {} if next(heads.parameters()).device.type == "meta" else {"device": output.weight.device}
        return heads.to(**on_device, dtype=cls.dtype_of(config, model)).train(model.training)

    @classmethod
    def check_tensors(cls, tensors: dict[str, torch.Tensor], heads: nn.Module, config: Any, adapter_name: str) -> None:
        check_tensors(tensors, heads, config, adapter_name)
        kind_of(config).check_tensors(tensors, config, adapter_name)

    @classmethod
    def dtype_of(cls, config: Any, model: Any) -> torch.dtype:
        if config.dtype is not None:
            return getattr(torch, config.dtype)
        # a CPU multiplies a few rows of half precision at half the pace, or less
        on_cpu = model.device.type == "cpu"
        return torch.float32 if on_cpu and model.dtype in (torch.float16, torch.bfloat16) else model.dtype


def register_head_kind(kind: HeadKind) -> None:
    """Make a kind of draft heads known: to PEFT and transformers, to training and to the command line.

    A kind of the same name is replaced.

    Raises:
        ConfigurationError: PEFT has a method of the name of its adapter type already.
    """
    register_type(kind.config.type_name, kind.config, tuner_for(kind.config))
    add_kind(kind)


def tuner_for(config: type[HeadConfig]) -> type[KindTuner]:
    """The PEFT method of an adapter type, made once: for a config called `<Name>Config` it is `<Name>Model`."""
    name = f"{config.__name__.removesuffix('Config')}Model"
    module = sys.modules[__name__]
    if name not in vars(module):
        body = {"prefix": f"{config.type_name.lower()}_", "__module__": __name__, "__doc__": KindTuner.__doc__}
        setattr(module, name, type(name, (KindTuner,), body))  # pickled models ask for it here
    return getattr(module, name)
