"""Draft heads as a PEFT method: every way in and out gives the same weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import KINDS, assert_as_before, assert_equal, scramble, state_of, statistics, trained, weights
from conftest import add_heads, prompt, run
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_bad_adapters import DAMAGES
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hf_specdec.errors import AdapterError
from hf_specdec.heads import MedusaConfig, TrainedExitConfig, find_heads
from hf_specdec.testing import tiny_model

# ---------------------------------------------------------------- out and in again

LOADERS: dict[str, Callable[[Any, Path, Path], Any]] = {
    "PeftModel.from_pretrained": lambda base, folder, origin: PeftModel.from_pretrained(base, folder),
    "PeftModel.from_pretrained, named": lambda base, folder, origin: PeftModel.from_pretrained(
        base, folder, adapter_name="mine"
    ),
    "PeftModel.from_pretrained, low memory": lambda base, folder, origin: PeftModel.from_pretrained(
        base, folder, low_cpu_mem_usage=True
    ),
    "PeftModel.from_pretrained, trainable": lambda base, folder, origin: PeftModel.from_pretrained(
        base, folder, is_trainable=True
    ),
    "model.load_adapter": lambda base, folder, origin: (base.load_adapter(str(folder)) and None) or base,
    "model.load_adapter, named": lambda base, folder, origin: (base.load_adapter(str(folder), "mine") and None) or base,
    "AutoPeftModelForCausalLM": lambda base, folder, origin: AutoPeftModelForCausalLM.from_pretrained(folder),
    "AutoModelForCausalLM": lambda base, folder, origin: AutoModelForCausalLM.from_pretrained(folder),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(base: Any, base_folder: Path, tmp_path: Path, kind: str, loader: str) -> None:
    first = trained(base, kind)
    expected, said = weights(base), statistics(base)
    before = {
        key: tensor.clone() for key, tensor in first.get_base_model().state_dict().items() if "spec_head" not in key
    }
    first.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    file = load_file(tmp_path / "adapter_model.safetensors")
    type_name = KINDS[kind]().type_name
    prefix = f"base_model.model.spec_head_container.{type_name.lower()}_heads."
    assert set(file) == {f"{prefix}{key}" for key in expected}, "the base model's weights were saved"
    fresh = AutoModelForCausalLM.from_pretrained(base_folder).eval()
    loaded = LOADERS[loader](fresh, tmp_path, base_folder)
    model = loaded.get_base_model() if isinstance(loaded, PeftModel) else loaded
    assert_equal(weights(model), expected)
    assert statistics(loaded) == said
    for key, tensor in before.items():
        assert torch.equal(model.state_dict()[key], tensor)
    config = model.peft_config["mine" if "named" in loader else "default"]
    asked = KINDS[kind]()
    assert type(config) is type(asked)
    assert (config.hidden_size, config.vocab_size) == (32, 97)
    filled_in = {"hidden_size", "vocab_size", "base_probe", "inference_mode", "base_model_name_or_path"}
    for setting in {field.name for field in fields(asked)} - filled_in:
        assert getattr(config, setting) == getattr(asked, setting), setting


def test_several_adapters_by_name(base: Any, tmp_path: Path) -> None:
    model = trained(base, adapter="one", seed=1)
    model.add_adapter("two", MedusaConfig(num_heads=2))
    scramble(base, "two", seed=2)
    one, two = weights(base, "one"), weights(base, "two")
    assert_equal(weights(base), one)
    model.set_adapter("two")
    assert_equal(weights(base), two)
    model.save_pretrained(tmp_path)
    fresh = tiny_model("llama")
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "one", adapter_name="first")
    loaded.load_adapter(str(tmp_path / "two"), "second")
    assert_equal(weights(fresh, "first"), one)
    assert_equal(weights(fresh, "second"), two)
    with pytest.warns(UserWarning, match="Setting active adapter to second"):  # PEFT's own
        loaded.delete_adapter("first")
    assert_equal(weights(fresh, "second"), two)
    with pytest.raises(AdapterError, match="no Medusa heads 'first'"):
        find_heads(fresh, "first", mode="medusa")
    plain = tiny_model("llama")
    plain.load_adapter(str(tmp_path / "one"), "first")
    plain.load_adapter(str(tmp_path / "two"), "second")
    assert_equal(weights(plain, "first"), one)
    assert_equal(weights(plain, "second"), two)
    asked = {"speculative_mode": "medusa", "max_new_tokens": 8}
    for name in ("first", "second"):
        output, _ = run(plain, prompt(), speculative_config={"adapter": name}, **asked)
        assert output.tolist() == run(plain, prompt(), max_new_tokens=8)[0].tolist()


def test_names_that_are_parts_of_keys(base: Any, tmp_path: Path) -> None:
    """PEFT and transformers look for the adapter's name in keys: one that stands there anyway must not confuse them."""
    for name in ("heads", "layers", "linear", "weight", "0", "spec"):
        base = tiny_model("llama")
        trained(base, "trimmed", adapter=name).save_pretrained(tmp_path)
        expected = weights(base)
        for loader in (
            lambda model: PeftModel.from_pretrained(model, tmp_path / name, adapter_name=name),  # noqa: B023
            lambda model: model.load_adapter(str(tmp_path / name), adapter_name=name),  # noqa: B023
        ):
            fresh = tiny_model("llama")
            loader(fresh)
            assert_equal(weights(fresh), expected)


def test_names_that_are_parts_of_another_adapters_keys(base: Any, tmp_path: Path) -> None:
    """PEFT would leave them all out when it saves the other one."""
    names = ["heads", "layers", "linear", "0", "other"]
    model = trained(base, adapter=names[0], seed=0)
    for seed, name in enumerate(names[1:], start=1):
        model.add_adapter(name, KINDS["trimmed"]())
        scramble(base, name, seed)
    expected = {name: weights(base, name) for name in names}
    model.save_pretrained(tmp_path)
    for way in ("peft", "transformers"):
        fresh = tiny_model("llama")
        loaded = PeftModel.from_pretrained(fresh, tmp_path / "0", adapter_name="0") if way == "peft" else fresh
        for name in names:
            if name != "0" or way == "transformers":
                loaded.load_adapter(str(tmp_path / name), adapter_name=name)
        for name in names:
            assert_equal(weights(fresh, name), expected[name])


def test_base_weights_are_not_saved_with_a_resized_vocabulary(base_folder: Path, tmp_path: Path) -> None:
    def resized() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base_folder).eval()
        torch.manual_seed(0)
        model.resize_token_embeddings(120)
        return model

    base = resized()
    model = trained(base)
    with pytest.warns(UserWarning, match="save_embedding_layers"):  # PEFT's own
        model.save_pretrained(tmp_path)
    assert all("medusa_heads" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    fresh = resized()
    fresh.load_adapter(str(tmp_path))
    assert_equal(weights(fresh), weights(base))


def test_unload_leaves_the_base_model_as_it_was(base: Any) -> None:
    keys, attributes = set(base.state_dict()), set(vars(base))
    model = trained(base)
    assert model.unload() is base
    assert set(base.state_dict()) == keys
    assert set(vars(base)) - {"peft_config"} == attributes - {"peft_config"}
    assert not hasattr(base, "peft_config")


def test_heads_cannot_be_merged(base: Any) -> None:
    model = trained(base)
    with pytest.raises(AdapterError, match="cannot be merged"):
        model.merge_and_unload()
    with pytest.raises(AdapterError, match="cannot be merged"):
        model.merge_adapter()
    assert statistics(base)


def test_heads_survive_copies_and_pickles(base: Any) -> None:
    add_heads(base, fitted=False)
    expected, said = weights(base), statistics(base)
    for other in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert_equal(weights(other), expected)
        with torch.no_grad():
            other.get_output_embeddings().weight.neg_()  # the copy's heads use the copy's LM head
        assert find_heads(other).draft_weight is not None
        assert statistics(other) != said or other.get_output_embeddings() is not base.get_output_embeddings()
    assert statistics(base) == said


def test_heads_follow_the_model_in_dtype(base_folder: Path, tmp_path: Path) -> None:
    trained(tiny_model("llama"), "trimmed").save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for load in (
            lambda model: PeftModel.from_pretrained(model, tmp_path),
            lambda model: model.load_adapter(str(tmp_path)),
        ):
            model = tiny_model("llama").to(dtype)
            load(model)
            heads = find_heads(model).weights
            # a CPU is slow in half precision
            assert heads.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
            assert heads.token_map is not None
            assert heads.token_map.dtype == torch.int64


def test_a_config_can_ask_for_half_precision(base: Any, tmp_path: Path) -> None:
    config = MedusaConfig(num_heads=2, dtype="bfloat16")
    get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    base.load_adapter(str(tmp_path))
    assert find_heads(base).weights.dtype == torch.bfloat16


def test_trainable_heads_are_float32_and_alone_in_it(base_folder: Path) -> None:
    model = get_peft_model(tiny_model("llama", dtype=torch.bfloat16), MedusaConfig(num_heads=2))
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable
    assert all("medusa_heads" in name for name in trainable)
    assert find_heads(model.get_base_model()).weights.dtype == torch.float32


def test_an_output_layer_of_low_rank_starts_as_the_closest_one_to_the_lm_head(base: Any) -> None:
    weight = base.get_output_embeddings().weight.detach()
    states = torch.randn(5, weight.shape[1])
    for rank in (weight.shape[1], 6):
        model = get_peft_model(base, MedusaConfig(num_heads=1, output_rank=rank))
        heads = find_heads(base)
        tokens = torch.arange(len(weight))
        u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
        expected = ((u[:, :rank] * s[:rank]) @ v[:rank]).float()
        torch.testing.assert_close(heads.output_weight(0).detach(), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            heads.logits(0, states).detach(), functional.linear(states, expected), atol=1e-4, rtol=1e-4
        )
        assert heads.tokens(tokens) is tokens
        model.unload()


def test_an_output_layer_of_low_rank_drafts_from_the_tokens_it_is_told(base: Any) -> None:
    rank = base.get_output_embeddings().weight.shape[1]
    settings = {"output_rank": rank, "draft_vocab_size": 7}
    for config in (MedusaConfig(**settings), TrainedExitConfig(exit_layer=1, **settings)):
        model = get_peft_model(base, config)
        head = find_heads(base)
        tokens = torch.tensor([3, 5, 8, 13, 21, 34, 55])
        head.draft_from(tokens)
        states = torch.randn(2, rank)
        rows = base.get_output_embeddings().weight.detach()[tokens]
        torch.testing.assert_close(head.shared_logits(states).detach(), functional.linear(states, rows))
        model.unload()


def test_a_rank_above_the_hidden_size_is_refused(base: Any) -> None:
    with pytest.raises(AdapterError, match="output_rank of these heads is 33"):
        get_peft_model(base, MedusaConfig(output_rank=33))
    assert not hasattr(base, "peft_config")


def test_beside_lora_on_a_plain_model(base: Any, base_folder: Path, tmp_path: Path) -> None:
    trained(tiny_model("llama")).save_pretrained(tmp_path / "heads")
    lora = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    lora.save_pretrained(tmp_path / "lora")
    base.load_adapter(str(tmp_path / "lora"), "lora")
    base.load_adapter(str(tmp_path / "heads"), "heads")
    expected, _ = run(base, prompt(), max_new_tokens=12)
    output, _ = run(
        base, prompt(), max_new_tokens=12, speculative_mode="medusa", speculative_config={"adapter": "heads"}
    )
    assert output.tolist() == expected.tolist()
    assert output.tolist() != run(tiny_model("llama"), prompt(), max_new_tokens=12)[0].tolist(), "LoRA had no effect"


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_what_lora_keeps_beside_itself_stays_on(base: Any, tmp_path: Path) -> None:
    """`modules_to_save` are switched by PEFT wherever an adapter is."""
    trained(tiny_model("llama")).save_pretrained(tmp_path / "heads")
    trained(tiny_model("llama")).save_pretrained(tmp_path / "bad")
    DAMAGES["NaN"][0](tmp_path / "bad")
    lora = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        lora.get_base_model().lm_head.modules_to_save["default"].weight.neg_()
    lora.save_pretrained(tmp_path / "lora")
    base.load_adapter(str(tmp_path / "lora"), "lora")
    expected = run(base, prompt(), max_new_tokens=12)[0].tolist()
    if transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 does not load modules_to_save")
    assert expected != run(tiny_model("llama"), prompt(), max_new_tokens=12)[0].tolist()
    with pytest.raises(AdapterError, match="not finite"):
        base.load_adapter(str(tmp_path / "bad"), "heads")
    assert run(base, prompt(), max_new_tokens=12)[0].tolist() == expected
    base.load_adapter(str(tmp_path / "heads"), "heads")
    assert run(base, prompt(), max_new_tokens=12)[0].tolist() == expected
    asked = {"speculative_mode": "medusa", "speculative_config": {"adapter": "heads"}}
    assert run(base, prompt(), max_new_tokens=12, **asked)[0].tolist() == expected


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_another_adapter_of_the_same_name(base: Any, tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("llama"), lora).save_pretrained(tmp_path / "lora")
    trained(tiny_model("llama")).save_pretrained(tmp_path / "heads")
    base.load_adapter(str(tmp_path / "heads"))
    before = state_of(base)
    with pytest.raises(AdapterError, match="draft heads 'default' already"):
        PeftModel.from_pretrained(base, tmp_path / "lora")
    assert_as_before(base, before)
    with pytest.warns(UserWarning, match="multiple adapters"):  # PEFT's own, and it goes on
        get_peft_model(base, lora)
    with pytest.raises(AdapterError, match="another adapter has taken that name"):
        run(base, prompt(), max_new_tokens=12, speculative_mode="medusa")


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_heads_onto_a_peft_model(base: Any, tmp_path: Path) -> None:
    trained(tiny_model("llama")).save_pretrained(tmp_path)
    lora = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = run(base, prompt(), max_new_tokens=12)[0].tolist()
    before = state_of(base)
    with pytest.raises(AdapterError, match="Pass its get_base_model"):
        PeftModel.from_pretrained(lora, tmp_path, adapter_name="heads")
    assert_as_before(base, before)
    PeftModel.from_pretrained(lora.get_base_model(), tmp_path, adapter_name="heads")
    asked = {"speculative_mode": "medusa", "speculative_config": {"adapter": "heads"}}
    assert run(base, prompt(), max_new_tokens=12, **asked)[0].tolist() == expected


def test_no_heads_at_all(base: Any) -> None:
    with pytest.raises(AdapterError, match=r"no Medusa heads.*load_adapter"):
        run(base, prompt(), max_new_tokens=4, speculative_mode="medusa")


def test_disabled_adapters(base: Any) -> None:
    model = trained(base)
    with model.disable_adapter(), pytest.raises(AdapterError, match="disabled"):
        run(base, prompt(), max_new_tokens=4, speculative_mode="medusa")
    assert statistics(base)


@pytest.mark.filterwarnings("ignore:Adapter name '' should not be contained in the prefix")
@pytest.mark.parametrize("name", ["a.b", "keys", ""])
def test_names_that_cannot_be(base: Any, name: str) -> None:
    keys = {key for key, _ in base.named_modules()}
    with pytest.raises(AdapterError, match="another name"):
        get_peft_model(base, MedusaConfig(num_heads=2), adapter_name=name)
    assert {key for key, _ in base.named_modules()} == keys


def test_provenance_that_makes_no_card(base: Any, tmp_path: Path) -> None:
    for provenance in ({"heads": 5}, {"versions": [1]}, {"data_seconds": "x"}, {"heads": [{"x": 1}]}):
        provenance = {"positions": 5, "held_out_positions": 5, **provenance}
        model = get_peft_model(base, MedusaConfig(num_heads=2, provenance=provenance))
        with pytest.warns(UserWarning, match="no model card"):
            model.save_pretrained(tmp_path / str(len(list(tmp_path.iterdir()))))
        model.unload()
