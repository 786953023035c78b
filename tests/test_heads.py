"""Draft heads as a PEFT method: every way in and out gives the same weights, and a bad adapter changes nothing."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import add_heads, prompt, run
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec.errors import AdapterError, InvalidSettingError
from hf_specdec.heads import MedusaConfig, find_exit, find_heads, has_exit
from hf_specdec.testing import tiny_model

# every kind of weights that an adapter may hold
KINDS: dict[str, dict[str, Any]] = {
    "independent": {"head_type": "independent"},
    "sequential": {"head_type": "sequential"},
    "tied": {"head_type": "sequential", "tied_heads": True, "num_layers": 2},
    "trimmed": {"head_type": "sequential", "draft_vocab_size": 40},
    "own": {"head_type": "independent", "own_lm_head": True, "num_layers": 2},
    "own_trimmed": {"head_type": "independent", "own_lm_head": True, "draft_vocab_size": 40},
    "low_rank": {"head_type": "sequential", "output_rank": 6},
    "low_rank_trimmed": {"head_type": "independent", "output_rank": 6, "draft_vocab_size": 40},
    "exit": {"head_type": "exit", "exit_layer": 2, "draft_vocab_size": 40},
    "low_rank_exit": {"head_type": "exit", "exit_layer": 2, "output_rank": 6},
}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def base(base_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_folder).eval()


def trained(base: Any, kind: str = "sequential", adapter: str = "default", seed: int = 3) -> PeftModel:
    """A `PeftModel` whose heads hold random weights, and a token map that is not the first one that comes to mind."""
    model = get_peft_model(base, MedusaConfig(num_heads=3, **KINDS[kind]), adapter_name=adapter)
    scramble(base, adapter, seed)
    return model


def scramble(base: Any, adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = found(base, adapter)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
        if heads.token_map is not None:
            heads.token_map.copy_(torch.randperm(97, generator=generator)[: len(heads.token_map)])


def weights(base: Any, adapter: str | None = None) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in found(base, adapter).state_dict().items()}


def found(base: Any, adapter: str | None = None) -> Any:
    """The module with an adapter's weights."""
    return find_exit(base, adapter).weights if has_exit(base) else find_heads(base, adapter).heads


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def statistics(model: Any) -> list[tuple[int, int]]:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    mode = "early_exit" if has_exit(base) else "medusa"
    config = {"num_draft_tokens": 6}
    with hf_specdec.record() as stats:
        run(model, prompt(2, padding=2), max_new_tokens=16, speculative_mode=mode, speculative_config=config)
    return [(row.drafted, row.accepted) for row in stats.rows]


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
    assert {key.rpartition("medusa_heads.")[2] for key in file} == set(expected), "the base model's weights were saved"
    fresh = AutoModelForCausalLM.from_pretrained(base_folder).eval()
    loaded = LOADERS[loader](fresh, tmp_path, base_folder)
    model = loaded.get_base_model() if isinstance(loaded, PeftModel) else loaded
    assert_equal(weights(model), expected)
    assert statistics(loaded) == said
    for key, tensor in before.items():
        assert torch.equal(model.state_dict()[key], tensor)
    config = model.peft_config["mine" if "named" in loader else "default"]
    assert isinstance(config, MedusaConfig)
    assert (config.hidden_size, config.vocab_size, config.num_heads) == (32, 97, 3)


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
        find_heads(fresh, "first")
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
        model.add_adapter(name, MedusaConfig(num_heads=3, **KINDS["trimmed"]))
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
            heads = find_heads(model).heads
            # a CPU is slow in half precision
            assert heads.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
            assert heads.token_map is not None
            assert heads.token_map.dtype == torch.int64


def test_a_config_can_ask_for_half_precision(base: Any, tmp_path: Path) -> None:
    config = MedusaConfig(num_heads=2, dtype="bfloat16")
    get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    base.load_adapter(str(tmp_path))
    assert find_heads(base).heads.dtype == torch.bfloat16


def test_trainable_heads_are_float32_and_alone_in_it(base_folder: Path) -> None:
    model = get_peft_model(tiny_model("llama", dtype=torch.bfloat16), MedusaConfig(num_heads=2))
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable
    assert all("medusa_heads" in name for name in trainable)
    assert find_heads(model.get_base_model()).heads.dtype == torch.float32


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
    for settings in ({"head_type": "independent"}, {"head_type": "exit", "exit_layer": 1}):
        model = get_peft_model(base, MedusaConfig(output_rank=rank, draft_vocab_size=7, **settings))
        head = find_exit(base) if has_exit(base) else find_heads(base)
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


# ---------------------------------------------------------------- what is refused


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


def test_no_heads_at_all(base: Any) -> None:
    with pytest.raises(AdapterError, match=r"no Medusa heads.*load_adapter"):
        run(base, prompt(), max_new_tokens=4, speculative_mode="medusa")


def test_disabled_adapters(base: Any) -> None:
    model = trained(base)
    with model.disable_adapter(), pytest.raises(AdapterError, match="disabled"):
        run(base, prompt(), max_new_tokens=4, speculative_mode="medusa")
    assert statistics(base)


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
        {"exit_layer": 3},
        {"exit_layer": None, "head_type": "exit"},
        {"own_lm_head": True, "head_type": "exit", "exit_layer": 2},
        {"num_layers": 2, "head_type": "exit", "exit_layer": 2},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=next(iter(settings))):
        MedusaConfig(**settings)


def test_config_comes_back_by_its_type(tmp_path: Path) -> None:
    MedusaConfig(num_heads=5, head_type="sequential").save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "MEDUSA"
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(loaded, MedusaConfig)
    assert (loaded.num_heads, loaded.head_type, loaded.task_type) == (5, "sequential", "CAUSAL_LM")


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


def test_an_adapter_without_weights(base: Any, tmp_path: Path) -> None:
    trained(tiny_model("llama")).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="could not be loaded"):
        base.load_adapter(str(tmp_path))
    with pytest.raises(AdapterError, match="could not be loaded"):
        PeftModel.from_pretrained(base, tmp_path)
    assert not hasattr(base, "peft_config")
