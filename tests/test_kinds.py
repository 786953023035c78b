"""Kinds of draft heads: their settings, their names, and several of them in one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from adapters import assert_as_before, assert_equal, state_of, trained, weights
from conftest import prompt, run
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from test_bad_adapters import DAMAGES

import hf_specdec
from hf_specdec.errors import AdapterError, ConfigurationError, InvalidSettingError
from hf_specdec.heads import (
    BoundExit,
    BoundHeads,
    HeadConfig,
    MedusaConfig,
    TrainedExitConfig,
    find_heads,
    get_head_kind,
    has_heads,
    head_kinds,
    kind_of,
    register_head_kind,
)
from hf_specdec.testing import tiny_model

# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "settings",
    [
        {"num_heads": 0},
        {"num_heads": 2.5},
        {"num_layers": True},
        {"num_layers": 99},
        {"head_type": "hydra"},
        {"draft_vocab_size": 0},
        {"output_rank": 0},
        {"output_rank": 8, "own_lm_head": True},
        {"dtype": "int8"},
        {"own_lm_head": "yes"},
        {"tied_heads": 1, "head_type": "sequential"},
        {"tied_heads": True, "head_type": "independent"},
        {"own_lm_head": True, "tied_heads": True, "head_type": "sequential"},
        {"base_probe": ["x"]},
        {"head_type": "exit"},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=next(iter(settings))):
        MedusaConfig(**settings)


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("exit_layer", {}),
        ("exit_layer", {"exit_layer": None}),
        ("exit_layer", {"exit_layer": -1}),
        ("exit_layer", {"exit_layer": True}),
        ("exit_layer", {"exit_layer": 1.5}),
        ("draft_vocab_size", {"exit_layer": 2, "draft_vocab_size": 0}),
        ("dtype", {"exit_layer": 2, "dtype": "int8"}),
        ("provenance", {"exit_layer": 2, "provenance": []}),
    ],
)
def test_settings_of_an_exit_are_checked(setting: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=setting):
        TrainedExitConfig(**settings)


def test_config_comes_back_by_its_type(tmp_path: Path) -> None:
    MedusaConfig(num_heads=5, head_type="sequential").save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "MEDUSA"
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(loaded, MedusaConfig)
    assert (loaded.num_heads, loaded.head_type, loaded.task_type) == (5, "sequential", "CAUSAL_LM")


# ---------------------------------------------------------------- names


def test_kinds_by_name_and_by_settings() -> None:
    assert {"independent", "sequential", "exit"} <= {kind.name for kind in head_kinds()}
    for kind in (get_head_kind(name) for name in ("independent", "sequential")):
        assert kind_of(kind.with_settings(num_heads=2)) is kind
        assert kind.with_settings().head_type == kind.name
    assert kind_of(TrainedExitConfig(exit_layer=1)) is get_head_kind("exit")
    with pytest.raises(ConfigurationError, match=r"Unknown kind.*'hydra'.*independent, sequential, exit"):
        get_head_kind("hydra")
    with pytest.raises(AdapterError, match="LoraConfig describes no registered kind"):
        kind_of(LoraConfig())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HEAD", "cannot be called 'HEAD'"),  # transformers would take the container for its prefix
        ("SPEC_HEAD", "cannot be called"),
        ("lower", "cannot be called"),
        ("ENDS_", "cannot be called"),
        ("LORA", "has an adapter type 'LORA' already"),
        ("MEDUSA", "has an adapter type 'MEDUSA' already"),
    ],
)
def test_adapter_types_that_cannot_be(name: str, said: str) -> None:
    @dataclass
    class OtherConfig(HeadConfig):
        type_name: ClassVar[str] = name

    before = head_kinds()
    with pytest.raises(ConfigurationError, match=said):
        register_head_kind(replace(get_head_kind("exit"), name="other", config=OtherConfig))
    assert head_kinds() == before


# ---------------------------------------------------------------- several kinds in one model


@pytest.mark.parametrize("order", [["heads", "exit"], ["exit", "heads"]])
def test_kinds_side_by_side(base: Any, tmp_path: Path, order: list[str]) -> None:
    """Loaded by either library, each drafts in its own mode, and each is saved without the other."""
    for name, kind in (("heads", "trimmed"), ("exit", "exit")):
        trained(tiny_model("llama"), kind, seed=len(name)).save_pretrained(tmp_path / name)
    for name in order:
        base.load_adapter(str(tmp_path / name), name)
    assert isinstance(find_heads(base, "heads"), BoundHeads)
    assert isinstance(find_heads(base, "exit"), BoundExit)
    assert find_heads(base).config is base.peft_config[order[-1]], "the active adapter's"
    plain, _ = run(base, prompt(2, padding=2), max_new_tokens=12)
    for mode in ("medusa", "early_exit"):
        assert has_heads(base, mode)
        with hf_specdec.record() as stats:
            asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 3}}
            output, _ = run(base, prompt(2, padding=2), max_new_tokens=12, **asked)
        assert output.tolist() == plain.tolist()
        assert stats.total.drafted > 0
    for name in order:
        alone = tiny_model("llama")
        PeftModel.from_pretrained(alone, tmp_path / name)
        assert_equal(weights(base, name), weights(alone))


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_saving_one_kind_leaves_the_other_out(base: Any, tmp_path: Path) -> None:
    model = trained(base, "trimmed", adapter="heads")
    trained(base, "exit", adapter="early").save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    for name in ("heads", "early"):
        fresh = tiny_model("llama")
        fresh.load_adapter(str(tmp_path / name), name)
        assert list(fresh.peft_config) == [name]
        assert_equal(weights(fresh, name), weights(base, name))


@pytest.mark.parametrize(
    "load",
    [
        lambda model, folder: PeftModel.from_pretrained(model, folder, adapter_name="heads"),
        lambda model, folder: model.load_adapter(str(folder), "heads"),
    ],
    ids=["peft", "transformers"],
)
@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_a_bad_adapter_of_another_kind_changes_nothing(base: Any, tmp_path: Path, load: Callable) -> None:
    trained(tiny_model("llama"), "exit").save_pretrained(tmp_path / "exit")
    trained(tiny_model("llama"), "trimmed").save_pretrained(tmp_path / "bad")
    DAMAGES["NaN"][0](tmp_path / "bad")
    base.load_adapter(str(tmp_path / "exit"), "exit")
    before = state_of(base)
    with pytest.raises(AdapterError, match="not finite"):
        load(base, tmp_path / "bad")
    assert_as_before(base, before)
    assert not has_heads(base, "medusa")


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_unloading_takes_out_every_kind(base: Any) -> None:
    keys = set(base.state_dict())
    trained(base, "trimmed", adapter="heads")
    model = trained(base, "exit", adapter="early")
    assert model.unload() is base
    assert set(base.state_dict()) == keys
    assert not hasattr(base, "peft_config")


def test_no_heads_of_a_mode_are_called_by_their_name(base: Any) -> None:
    trained(base, "exit")
    with pytest.raises(AdapterError, match="no Medusa heads"):
        find_heads(base, mode="medusa")
    with pytest.raises(AdapterError, match="no trained exit 'other'"):
        find_heads(base, "other", mode="early_exit")
    with pytest.raises(AdapterError, match="no draft heads"):
        find_heads(tiny_model("llama"))


def test_an_exit_above_the_last_layer_is_refused() -> None:
    with pytest.raises(AdapterError, match="after layer 3; LlamaForCausalLM has only 3 layers"):
        get_peft_model(tiny_model("llama"), TrainedExitConfig(exit_layer=3))
