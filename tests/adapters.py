"""Adapters of draft heads for tests: configs of every kind, random weights, and what is compared of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conftest import prompt, run
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

import hf_specdec
from hf_specdec.heads import HeadConfig, MedusaConfig, TrainedExitConfig, find_heads, has_heads

# every kind of weights that an adapter may hold
KINDS: dict[str, Callable[[], HeadConfig]] = {
    "independent": lambda: MedusaConfig(num_heads=3, head_type="independent"),
    "sequential": lambda: MedusaConfig(num_heads=3, head_type="sequential"),
    "tied": lambda: MedusaConfig(num_heads=3, head_type="sequential", tied_heads=True, num_layers=2),
    "trimmed": lambda: MedusaConfig(num_heads=3, head_type="sequential", draft_vocab_size=40),
    "own": lambda: MedusaConfig(num_heads=3, head_type="independent", own_lm_head=True, num_layers=2),
    "own_trimmed": lambda: MedusaConfig(num_heads=3, head_type="independent", own_lm_head=True, draft_vocab_size=40),
    "low_rank": lambda: MedusaConfig(num_heads=3, head_type="sequential", output_rank=6),
    "low_rank_trimmed": lambda: MedusaConfig(num_heads=3, head_type="independent", output_rank=6, draft_vocab_size=40),
    "exit": lambda: TrainedExitConfig(exit_layer=2, draft_vocab_size=40),
    "low_rank_exit": lambda: TrainedExitConfig(exit_layer=2, output_rank=6),
}


def trained(base: Any, kind: str = "sequential", adapter: str = "default", seed: int = 3) -> PeftModel:
    """A `PeftModel` whose heads hold random weights, and a token map that is not the first one that comes to mind."""
    model = get_peft_model(base, KINDS[kind](), adapter_name=adapter)
    scramble(base, adapter, seed)
    return model


def scramble(base: Any, adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = find_heads(base, adapter).weights
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
        if heads.token_map is not None:
            heads.token_map.copy_(torch.randperm(97, generator=generator)[: len(heads.token_map)])


def weights(base: Any, adapter: str | None = None) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in find_heads(base, adapter).weights.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def statistics(model: Any) -> list[tuple[int, int]]:
    """Per row, the tokens (drafted, accepted) of a call with the mode that the heads are for."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    mode = "early_exit" if has_heads(base, "early_exit") else "medusa"
    config = {"num_draft_tokens": 6}
    with hf_specdec.record() as stats:
        run(model, prompt(2, padding=2), max_new_tokens=16, speculative_mode=mode, speculative_config=config)
    return [(row.drafted, row.accepted) for row in stats.rows]


def state_of(base: Any) -> tuple[dict[str, torch.Tensor], Any]:
    return (
        {key: tensor.clone() for key, tensor in base.state_dict().items()},
        (
            set(vars(base)),
            sorted(getattr(base, "peft_config", {})),
            {name: module.training for name, module in base.named_modules()},
            {name: weight.requires_grad for name, weight in base.named_parameters()},
            {
                name: list(module.active_adapters)
                for name, module in base.named_modules()
                if isinstance(module, BaseTunerLayer)
            },
        ),
    )


def assert_as_before(base: Any, before: tuple[dict[str, torch.Tensor], Any]) -> None:
    tensors, rest = state_of(base)
    assert_equal(tensors, before[0])
    assert rest == before[1]
