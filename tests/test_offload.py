"""Weights that accelerate keeps on the CPU or on disk until they are needed: the same text, in fewer loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook
from conftest import LOOKUP, assert_same, model_of, prompt, run, texts_of

import hf_specdec
from hf_specdec.host.models import execution_device
from hf_specdec.testing import ScriptedDrafter, tiny_model

CPU = torch.device("cpu")


def offloaded(where: str, folder: Path, name: str = "llama", **settings: Any) -> Any:
    model = tiny_model(name, **settings)
    if where == "cpu":
        return cpu_offload(model, execution_device=CPU)
    return disk_offload(model, str(folder), execution_device=CPU)


def loaded(model: Any) -> list[str]:
    """Weights that are not away."""
    return [name for name, weight in model.named_parameters() if weight.device.type != "meta"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every loading of a module's weights."""
    made: list[int] = []
    original = AlignDevicesHook.pre_forward

    def counting(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.offload and next(module.parameters(recurse=False), None) is not None:
            made.append(1)
        return original(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", counting)
    return made


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead", "early_exit", "assistant"])
def test_the_same_text(where: str, mode: str, tmp_path: Path) -> None:
    model = offloaded(where, tmp_path)
    assert model.device.type == "meta"
    assert execution_device(model) == CPU
    asked: dict[str, Any] = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
    if mode == "assistant":
        asked["assistant_model"] = model_of("llama", num_hidden_layers=2)
    for sampling in ({}, {"do_sample": True}):
        assert_same(model, prompt(2, padding=3, repeat=True), asked, max_new_tokens=14, **sampling)
    assert loaded(model) == []


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_other_kinds_of_layers(name: str, tmp_path: Path) -> None:
    model = offloaded("cpu", tmp_path, name)
    assert_same(model, prompt(2, padding=3, repeat=True), LOOKUP, max_new_tokens=14)
    assert loaded(model) == []


def test_a_draft_model_that_is_offloaded(tmp_path: Path) -> None:
    draft = offloaded("cpu", tmp_path, num_hidden_layers=2)
    asked = {"speculative_mode": "assistant", "assistant_model": draft, "speculative_config": {"num_draft_tokens": 4}}
    assert_same(model_of("llama"), prompt(2, padding=3), asked, max_new_tokens=14)
    assert loaded(draft) == []


def test_loads_fall_by_the_mean_acceptance_length(loads: list[int], tmp_path: Path) -> None:
    """Each forward loads all weights once, whatever its width. This is where speculation pays most."""
    model, inputs = offloaded("cpu", tmp_path), prompt(1)
    decoding: dict[str, Any] = {"max_new_tokens": 49, "eos_token_id": None}
    texts = texts_of(model, inputs, **decoding)
    run(model, inputs, max_new_tokens=2, **LOOKUP)  # the self-test is not what is counted here
    loads.clear()
    run(model, inputs, **decoding)
    plain = len(loads)
    assert plain % 49 == 0  # a forward for each token
    loads.clear()
    with hf_specdec.record() as stats:
        output, _ = run(
            model,
            inputs,
            **decoding,
            speculative_mode=ScriptedDrafter.knowing(texts, 5),
            speculative_config={"num_draft_tokens": 5},
        )
    assert output.tolist() == texts
    assert stats.mean_acceptance_length == 6.0
    assert len(loads) * 49 == plain * (1 + 48 // 6)
