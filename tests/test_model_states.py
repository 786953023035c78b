"""What changes a model between calls, or for one call: adapters, hooks, settings, classes of its own, default devices.

What was found out about a model holds for the state it was found in; what cannot be done exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import LOOKUP, assert_same, model_of, prompt, run, texts_of
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_specdec
from hf_specdec import errors
from hf_specdec.memory import state_of
from hf_specdec.testing import ScriptedDrafter, tiny_model

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 64, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
SIX = {"num_draft_tokens": 6}


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], ["lm_head"], ["q_proj", "gate_proj"]])
@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead"])
def test_lora_wherever_it_is(targets: list[str], mode: str) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=targets, **LORA)).eval()
    inputs = prompt(2, padding=3, repeat=True)
    plain, _ = run(model, inputs, max_new_tokens=16)
    with model.disable_adapter():
        assert run(model, inputs, max_new_tokens=16)[0].tolist() != plain.tolist(), "LoRA had no effect"
    for asked in (mode, ScriptedDrafter.knowing(texts_of(model, inputs, max_new_tokens=16), 6)):
        assert_same(model, inputs, {"speculative_mode": asked, "speculative_config": SIX}, max_new_tokens=16)


def test_adapters_that_are_switched_between_calls() -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], **LORA), adapter_name="one")
    model.add_adapter("two", LoraConfig(target_modules=["v_proj", "o_proj"], **LORA))
    model.eval()
    seen, inputs = set(), prompt(2, padding=3, repeat=True)
    for adapter in ("one", "two", "one"):
        model.set_adapter(adapter)
        assert_same(model, inputs, LOOKUP, max_new_tokens=16)
        seen.add(str(texts_of(model, inputs, max_new_tokens=16)))
    with model.disable_adapter():
        assert_same(model, inputs, LOOKUP, max_new_tokens=16)
        seen.add(str(texts_of(model, inputs, max_new_tokens=16)))
    assert len(seen) == 3


@pytest.mark.parametrize("batch", [1, 2])
def test_a_draft_model_with_lora(batch: int) -> None:
    draft = get_peft_model(tiny_model("llama", seed=1), LoraConfig(target_modules=["q_proj"], **LORA)).eval()
    asked = {"speculative_mode": "assistant", "assistant_model": draft, "speculative_config": {"num_draft_tokens": 4}}
    for sampling in ({}, {"do_sample": True}):
        assert_same(model_of("llama"), prompt(batch, padding=3), asked, max_new_tokens=16, **sampling)


@pytest.mark.parametrize("known", [False, True], ids=["first use", "known"])
def test_an_adapter_for_each_row_is_refused(known: bool) -> None:
    """PEFT counts the rows of the prompts. It leaves its hooks on after an exception; they are taken off."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], **LORA), adapter_name="one")
    model.add_adapter("two", LoraConfig(target_modules=["v_proj"], **LORA))
    model.eval()
    inputs, names = prompt(3, padding=2, repeat=True), {"adapter_names": ["one", "two", "__base__"]}
    if known:
        run(model, inputs, max_new_tokens=4, **LOOKUP)
    plain, _ = run(model, inputs, max_new_tokens=12, **names)
    before = hooks_of(model)
    with pytest.raises(errors.UnsupportedModelError, match="uses adapter_names"):
        run(model, inputs, max_new_tokens=12, **names, **LOOKUP)
    assert hooks_of(model) == before
    with pytest.warns(UserWarning, match="Decoding plainly.*adapter_names"):
        ours, _ = run(
            model, inputs, max_new_tokens=12, **names, **LOOKUP, speculative_config={"on_unsupported": "plain"}
        )
    assert ours.tolist() == plain.tolist()
    assert_same(model, inputs, LOOKUP, max_new_tokens=12)


def test_peft_leaves_no_hooks_after_any_error() -> None:
    model = get_peft_model(
        tiny_model("llama"), LoraConfig(target_modules=["q_proj"], **LORA), adapter_name="one"
    ).eval()

    def broken(row: int, text: list[int]) -> list[int]:
        raise RuntimeError("a broken drafter")

    before = hooks_of(model)
    with pytest.raises((RuntimeError, errors.UnsupportedModelError)):
        run(model, prompt(2), max_new_tokens=4, adapter_names=["one", "one"], speculative_mode=ScriptedDrafter(broken))
    assert hooks_of(model) == before


def test_an_activated_lora_is_refused() -> None:
    """It applies from an offset of the prompt on, which a block of drafted tokens does not have."""
    config = LoraConfig(target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[11, 12], **LORA)
    base = tiny_model("llama")
    model = get_peft_model(base, config).eval()
    inputs = prompt(1, length=14, repeat=True)
    inputs["input_ids"][0, -2:] = torch.tensor([11, 12])
    plain, _ = run(model, inputs, max_new_tokens=12)
    with model.disable_adapter():
        assert_same(model, inputs, LOOKUP, max_new_tokens=12)
    before = hooks_of(model)
    with pytest.raises(errors.UnsupportedModelError, match=r"activated LoRA \(alora_invocation_tokens\)"):
        run(model, inputs, max_new_tokens=12, **LOOKUP)
    assert hooks_of(model) == before
    assert run(model, inputs, max_new_tokens=12)[0].tolist() == plain.tolist()


# ---------------------------------------------------------------- classes of one's own


class Typed(transformers.GPT2LMHeadModel):
    """Gives every forward token types, as remote code does."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "token_type_ids": torch.full_like(inputs["input_ids"], 5)}


class Updating(transformers.GPT2LMHeadModel):
    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super()._update_model_kwargs_for_generation(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "method"),
    [(Typed, "prepare_inputs_for_generation"), (Updating, "_update_model_kwargs_for_generation")],
)
def test_classes_that_make_the_inputs_of_their_steps_are_refused(kind: type, method: str) -> None:
    model = kind(model_of("gpt2").config).eval()
    with pytest.raises(errors.UnsupportedModelError, match=f"{kind.__name__} has a {method} of its own"):
        run(model, prompt(), max_new_tokens=8, **LOOKUP)
    with pytest.warns(UserWarning, match="Decoding plainly"):
        ours, _ = run(model, prompt(), max_new_tokens=8, **LOOKUP, speculative_config={"on_unsupported": "plain"})
    assert ours.tolist() == run(model, prompt(), max_new_tokens=8)[0].tolist()


def test_a_class_that_changes_nothing_of_the_steps_is_not() -> None:
    class Named(transformers.GPT2LMHeadModel):
        pass

    assert_same(Named(model_of("gpt2").config).eval(), prompt(), LOOKUP, max_new_tokens=8)


# ---------------------------------------------------------------- what a finding holds for


def set_window(model: Any) -> None:
    model.config.sliding_window = 3


def train_a_part(model: Any) -> None:
    model.transformer.h[0].train()


def replace_a_class(model: Any) -> None:
    class Other(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj.__class__ = Other


def put_on_a_forward(model: Any) -> None:
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda *args: original(*args)


def put_on_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", set_window),
        ("gpt2", train_a_part),
        ("llama", replace_a_class),
        ("llama", put_on_a_forward),
        ("llama", put_on_a_hook),
    ],
)
def test_changes_that_make_another_state(name: str, change: Callable[[Any], None]) -> None:
    model = tiny_model(name)
    before = state_of(model)
    assert state_of(model) == before
    change(model)
    assert state_of(model) != before


def test_forwards_that_follow_one_another_are_told_apart() -> None:
    """The second may come to lie where the first has been."""
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp
    original = layer.forward
    seen = set()
    for _ in range(20):
        layer.forward = lambda *args: original(*args)
        seen.add(state_of(model))
        del layer.forward
    assert len(seen) == 20


def test_a_window_that_is_narrowed_after_the_first_use() -> None:
    model = tiny_model("mistral")
    assert_same(model, prompt(), LOOKUP, max_new_tokens=12)
    model.config.sliding_window = 3
    inputs = prompt()
    texts = texts_of(model, inputs, max_new_tokens=16)
    knowing = {"speculative_mode": ScriptedDrafter.knowing(texts, 6), "speculative_config": SIX}
    assert_same(model, inputs, knowing, max_new_tokens=16)


def test_dropout_in_a_part_of_the_model() -> None:
    model = tiny_model("gpt2")
    run(model, prompt(), max_new_tokens=4, **LOOKUP)
    model.transformer.h[0].train()
    with pytest.raises(errors.UnsupportedModelError, match=r"training mode with dropout.*model.eval\(\)"):
        run(model, prompt(), max_new_tokens=4, **LOOKUP)


def test_autocast_is_a_state() -> None:
    model = model_of("llama")
    before = state_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert state_of(model) != before


# ---------------------------------------------------------------- default devices, vocabularies, positions


@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead", "early_exit", "assistant"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_under_another_default_device(mode: str, do_sample: bool) -> None:
    """Nothing is made on the default device by accident: there is nothing on `meta`."""
    model, inputs = model_of("llama"), prompt(2, padding=3, repeat=True)
    asked: dict[str, Any] = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
    if mode == "assistant":
        asked["assistant_model"] = model_of("llama", num_hidden_layers=2)
    texts = []
    with torch.device("meta"):
        for speculation in ({}, asked):
            torch.manual_seed(5)
            texts.append(run(model, inputs, max_new_tokens=12, do_sample=do_sample, **speculation)[0].tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "processing",
    [
        {"bad_words_ids": [[5], [6, 7]]},
        {"sequence_bias": [[[5], 2.0]]},
        {"suppress_tokens": [95]},
        {"bad_words_ids": [[5]], "do_sample": True},
        {"sequence_bias": [[[95], 9.0]], "do_sample": True, "temperature": 0.7},
    ],
)
def test_processors_that_name_tokens_which_the_draft_model_lacks(processing: dict[str, Any]) -> None:
    draft = tiny_model("llama", vocab_size=90)
    asked = {"speculative_mode": "assistant", "assistant_model": draft, "speculative_config": {"num_draft_tokens": 4}}
    assert_same(model_of("llama"), prompt(2, padding=3), asked, max_new_tokens=16, **processing)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "typical"])
@pytest.mark.filterwarnings("ignore:acceptance='typical' is lossy")
def test_drafted_tokens_without_a_score(rule: str) -> None:
    """An embedding that is larger than the LM head: the prompt has tokens that no output is for."""
    model = tiny_model("llama")
    model.set_input_embeddings(nn.Embedding(105, 32))
    inputs = prompt(2, length=14, repeat=True)
    ids = inputs["input_ids"]
    ids[:, 4], ids[:, 5], ids[:, 11], ids[:, 12] = ids[:, 13], 101, 40, 41
    with hf_specdec.record() as stats:
        output, _ = run(
            model,
            inputs,
            max_new_tokens=10,
            do_sample=True,
            eos_token_id=None,
            **LOOKUP,
            speculative_config={"acceptance": rule, "num_draft_tokens": 4},
        )
    assert output.shape == (2, 24)
    assert int(output[:, 14:].max()) < 97
    assert stats.rounds > 0


def qwen2_vl() -> Any:
    """A tiny vision-language model whose positions have three dimensions (M-RoPE)."""
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 88, "vision_end_token_id": 89}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead"])
def test_text_to_a_model_whose_positions_have_several_dimensions(mode: str, batch: int) -> None:
    model, inputs = qwen2_vl(), prompt(batch, padding=3, repeat=True)
    asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 5}}
    for sampling in ({}, {"do_sample": True}):
        assert_same(model, inputs, asked, max_new_tokens=20, pad_token_id=0, **sampling)
    decoding = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None}
    knowing = ScriptedDrafter.knowing(texts_of(model, inputs, **decoding), 5)
    asked = {"speculative_mode": knowing, "speculative_config": {"num_draft_tokens": 5}}
    stats = assert_same(model, inputs, asked, **decoding)
    assert stats.rounds == 4  # 19 tokens after the prompt's, six in a round
