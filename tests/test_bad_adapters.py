"""Adapters that are broken, or for another model: each is refused by name, and the model stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import assert_as_before, state_of, statistics, trained
from conftest import prompt, run
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from hf_specdec.errors import AdapterError, InvalidSettingError
from hf_specdec.heads import MedusaConfig
from hf_specdec.testing import tiny_model


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return damage


def _settings(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def _key(tensors: dict[str, torch.Tensor], end: str) -> str:
    (key,) = [key for key in tensors if key.endswith(end)]
    return key


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_key(tensors, "heads.1.layers.0.linear.weight")][3, 4] = torch.nan


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_key(tensors, "heads.2.layers.0.linear.bias")]


def _no_map(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[_key(tensors, "token_map")]


def _unexpected(tensors: dict[str, torch.Tensor]) -> None:
    key = _key(tensors, "heads.0.layers.0.linear.bias")
    tensors[key.replace("heads.0.layers", "heads.7.layers")] = tensors[key].clone()


def _base_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.zeros(32)


def _shape(tensors: dict[str, torch.Tensor]) -> None:
    key = _key(tensors, "heads.0.layers.0.linear.weight")
    tensors[key] = tensors[key][:, :-1].contiguous()


def _whole(tensors: dict[str, torch.Tensor]) -> None:
    key = _key(tensors, "heads.0.layers.0.linear.weight")
    tensors[key] = tensors[key].to(torch.int8)


def _map(values: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        key = _key(tensors, "token_map")
        tensors[key] = values(tensors[key].clone()).contiguous()

    return _tensors(change)


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _corrupt(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 1000)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN": (_tensors(_nan), r"not finite.*heads\.1\.layers\.0\.linear\.weight"),
    "a missing tensor": (_tensors(_missing), r"heads\.2\.layers\.0\.linear\.bias"),
    "no token map": (_tensors(_no_map), r"token_map"),
    "an unexpected tensor": (_tensors(_unexpected), r"heads\.7\.layers"),
    "a weight of the base model": (_tensors(_base_weight), r"norm\.weight"),
    "a wrong shape": (_tensors(_shape), r"heads\.0\.layers\.0\.linear\.weight"),
    "whole numbers": (_tensors(_whole), r"no floating-point numbers.*heads\.0\.layers\.0\.linear\.weight"),
    "a map beyond the vocabulary": (_map(lambda tokens: tokens + 97), "token_map.*97"),
    "a negative map": (_map(lambda tokens: tokens - 98), "token_map"),
    "a map with a token twice": (_map(lambda tokens: torch.zeros_like(tokens)), "token_map.*twice"),
    "a file that was cut off": (_cut, "could not be loaded"),
    "a corrupted file": (_corrupt, "could not be loaded"),
    "more heads than there are": (_settings(num_heads=4), r"heads\.3\.layers"),
    "fewer heads than there are": (_settings(num_heads=2), r"heads\.2\.layers"),
    "another hidden size": (_settings(hidden_size=64), "hidden size of 64"),
    "another vocabulary": (_settings(vocab_size=32000), "vocabulary of 32000"),
    "another embedding": (_settings(base_probe=[(-1.0) ** i for i in range(64)]), "another model"),
    "too many draft tokens": (_settings(vocab_size=None, draft_vocab_size=98), "only 97"),
    "a giant": (_settings(num_heads=10**9), "num_heads"),
    "heads of no type": (_settings(head_type="telepathic"), "head_type"),
}


@pytest.mark.parametrize("method", ["peft", "peft, second", "transformers", "transformers, second"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_adapter_is_refused_and_changes_nothing(base: Any, tmp_path: Path, damage: str, method: str) -> None:
    trained(tiny_model("llama"), "trimmed").save_pretrained(tmp_path / "good")
    trained(tiny_model("llama"), "trimmed").save_pretrained(tmp_path / "bad")
    change, message = DAMAGES[damage]
    change(tmp_path / "bad")
    second = "second" in method
    if method.startswith("peft"):
        model = PeftModel.from_pretrained(base, tmp_path / "good") if second else None

        def load(name: str) -> None:
            if second:
                model.load_adapter(str(tmp_path / name), "other")
            else:
                PeftModel.from_pretrained(base, tmp_path / name)
    else:
        if second:
            base.load_adapter(str(tmp_path / "good"))

        def load(name: str) -> None:
            base.load_adapter(str(tmp_path / name), "other" if second else None)

    base.train()
    before = state_of(base)
    with pytest.raises((AdapterError, InvalidSettingError), match=message):
        load("bad")
    assert_as_before(base, before)
    load("good")
    assert statistics(base.eval())


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.parametrize("beside", ["heads", "lora"])
@pytest.mark.parametrize("damage", ["NaN", "a file that was cut off", "another embedding"])
def test_a_bad_adapter_beside_another_changes_nothing(base: Any, tmp_path: Path, beside: str, damage: str) -> None:
    """`PeftModel.from_pretrained` on a model that transformers has loaded an adapter into, under any name."""
    for name in ("good", "bad"):
        trained(tiny_model("llama"), "trimmed").save_pretrained(tmp_path / name)
    change, message = DAMAGES[damage]
    change(tmp_path / "bad")
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("llama"), lora).save_pretrained(tmp_path / "lora")
    base.load_adapter(str(tmp_path / ("good" if beside == "heads" else "lora")))
    base.train()
    before, (expected, _) = state_of(base), run(base.eval(), prompt(), max_new_tokens=12)
    base.train()
    with pytest.raises(AdapterError, match=message):
        PeftModel.from_pretrained(base, tmp_path / "bad", adapter_name="other")
    assert_as_before(base, before)
    for folder in ("good", "bad"):
        with pytest.raises(AdapterError, match="'default' already"):
            PeftModel.from_pretrained(base, tmp_path / folder)
        assert_as_before(base, before)
    with pytest.raises(AdapterError, match="'default' already"):
        get_peft_model(base, MedusaConfig(num_heads=2))
    assert_as_before(base, before)
    PeftModel.from_pretrained(base, tmp_path / "good", adapter_name="other")
    asked = {"speculative_mode": "medusa", "speculative_config": {"adapter": "other"}}
    assert run(base.eval(), prompt(), max_new_tokens=12, **asked)[0].tolist() == expected.tolist()


def test_the_active_adapter_stays_when_another_fails_to_load(base: Any, tmp_path: Path) -> None:
    trained(tiny_model("llama")).save_pretrained(tmp_path / "good")
    trained(tiny_model("llama")).save_pretrained(tmp_path / "bad")
    DAMAGES["NaN"][0](tmp_path / "bad")
    base.load_adapter(str(tmp_path / "good"), "one")
    base.load_adapter(str(tmp_path / "good"), "two")
    before = state_of(base)
    with pytest.raises(AdapterError, match="not finite"):
        base.load_adapter(str(tmp_path / "bad"), "three")
    assert_as_before(base, before)
    assert base.spec_head_container.active_adapters == ["two"]


def test_heads_of_another_model_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    trained(tiny_model("llama", seed=1)).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="another model"):
        PeftModel.from_pretrained(tiny_model("llama", seed=2), tmp_path)
    slightly = tiny_model("llama", seed=1)
    with torch.no_grad():  # as fine-tuning does
        slightly.get_input_embeddings().weight.mul_(1.01).add_(0.01)
    assert PeftModel.from_pretrained(slightly, tmp_path)


def test_weights_that_were_never_loaded_show(base: Any) -> None:
    get_peft_model(base, MedusaConfig(num_heads=2, inference_mode=True))
    with pytest.raises(AdapterError, match="never loaded"):
        run(base, prompt(), max_new_tokens=4, speculative_mode="medusa")


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_what_else_is_on_the_model_stays(base: Any, base_folder: Path, tmp_path: Path) -> None:
    """Another adapter keeps its config and its frozen base model when heads go, and when heads fail to load."""
    lora = {"target_modules": ["q_proj"], "init_lora_weights": False}
    get_peft_model(tiny_model("llama"), LoraConfig(**lora)).save_pretrained(tmp_path / "lora")
    trained(tiny_model("llama")).save_pretrained(tmp_path / "heads")
    trained(tiny_model("llama")).save_pretrained(tmp_path / "bad")
    DAMAGES["NaN"][0](tmp_path / "bad")

    def frozen() -> dict[str, bool]:
        return {name: weight.requires_grad for name, weight in base.named_parameters() if "spec_head" not in name}

    base.load_adapter(str(tmp_path / "lora"), "lora")
    before, attributes = frozen(), set(vars(base))
    with pytest.raises(AdapterError, match="not finite"):
        base.load_adapter(str(tmp_path / "bad"), "heads")
    assert frozen() == before
    assert set(vars(base)) == attributes
    model = get_peft_model(base, MedusaConfig(num_heads=2), adapter_name="heads")
    assert model.unload() is base
    assert list(base.peft_config) == ["lora"]
    assert frozen() == before
    base.load_adapter(str(tmp_path / "heads"), "heads")
    grads = {name: weight.requires_grad for name, weight in base.named_parameters()}
    with pytest.raises(AdapterError, match="not finite"):
        base.load_adapter(str(tmp_path / "bad"), "second")
    assert {name: weight.requires_grad for name, weight in base.named_parameters()} == grads


def test_an_adapter_without_weights(base: Any, tmp_path: Path) -> None:
    trained(tiny_model("llama")).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="could not be loaded"):
        base.load_adapter(str(tmp_path))
    with pytest.raises(AdapterError, match="could not be loaded"):
        PeftModel.from_pretrained(base, tmp_path)
    assert not hasattr(base, "peft_config")
