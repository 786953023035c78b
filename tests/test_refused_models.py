"""Models and caches that cannot take part: refused by name before the model runs, or decoded plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import LOOKUP, assert_same, assert_unchanged, model_of, prompt, refused, run, snapshot

from hf_specdec import errors
from hf_specdec.host.generate import CACHE_KEY
from hf_specdec.testing import ScriptedDrafter, tiny_model


def test_caches_that_cannot_be_rolled_back() -> None:
    refused(errors.UnsupportedCacheError, "quantized", cache_implementation="quantized")
    refused(errors.UnsupportedCacheError, "offloaded", cache_implementation="offloaded")
    refused(errors.UnsupportedCacheError, "Cache", **{CACHE_KEY: object()})
    offloaded = transformers.DynamicCache(config=model_of("llama").config)
    offloaded.offloading = True
    refused(errors.UnsupportedCacheError, "offloaded", **{CACHE_KEY: offloaded})


def mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return transformers.MambaForCausalLM(config).eval()


def test_a_model_that_cannot_roll_back() -> None:
    model = mamba()
    before = snapshot(model)
    with pytest.raises(errors.UnsupportedModelError, match="MambaForCausalLM keeps a recurrent state"):
        run(model, prompt(), max_new_tokens=6, **LOOKUP)
    assert_unchanged(model, before)


def steer_single_steps(output: torch.Tensor) -> torch.Tensor:
    return output + 3 if output.shape[1] == 1 else output


def steer_blocks(output: torch.Tensor) -> torch.Tensor:
    return output + 3 * torch.arange(output.shape[-1]) if output.shape[1] > 1 else output


def steer_the_newest(output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output[:, :-1], output[:, -1:] + 3 * torch.arange(output.shape[-1])], dim=1)


@pytest.mark.parametrize("steer", [steer_single_steps, steer_blocks, steer_the_newest])
@pytest.mark.parametrize("layer", [0, 2])
def test_hooks_that_treat_steps_and_blocks_differently(steer: Any, layer: int) -> None:
    """Activation steering, as it is usually written, gives a block other scores than single steps: refused."""
    model = tiny_model("llama")
    handle = model.model.layers[layer].register_forward_hook(lambda module, inputs, output: steer(output))
    with pytest.raises(errors.UnsupportedModelError, match=r"in one forward, differ from.* one by one"):
        run(model, prompt(), max_new_tokens=6, **LOOKUP)
    handle.remove()
    assert_same(model, prompt(), LOOKUP, max_new_tokens=6)
    every = model.model.layers[layer].register_forward_hook(lambda module, inputs, output: output * 1.5)
    assert_same(model, prompt(), LOOKUP, max_new_tokens=6)  # every token alike
    every.remove()


def test_plain_decoding_with_a_warning_where_that_was_asked_for() -> None:
    model = mamba()
    expected, _ = run(model, prompt(), max_new_tokens=6)
    with pytest.warns(UserWarning, match="Decoding plainly.*MambaForCausalLM"):
        output, _ = run(model, prompt(), max_new_tokens=6, speculative_config={"on_unsupported": "plain"}, **LOOKUP)
    assert output.tolist() == expected.tolist()
    with pytest.warns(UserWarning, match="num_beams"):
        beams, _ = run(
            model_of("llama"),
            prompt(),
            max_new_tokens=6,
            num_beams=2,
            speculative_config={"on_unsupported": "plain"},
            **LOOKUP,
        )
    expected, _ = run(model_of("llama"), prompt(), max_new_tokens=6, num_beams=2)
    assert beams.tolist() == expected.tolist()


def test_plain_decoding_where_only_the_made_cache_shows_that_it_must_be() -> None:
    """The static window is found out inside generate: no second prompt for the streamer, the same text."""
    from test_conformance import Collect

    model, inputs = model_of("gemma3"), prompt()
    kwargs = {"max_new_tokens": 8, "cache_implementation": "static"}
    plain, ours = Collect(), Collect()
    expected, _ = run(model, inputs, streamer=plain, **kwargs)
    with pytest.warns(UserWarning, match="StaticSlidingWindowLayer"):
        output, _ = run(
            model, inputs, streamer=ours, speculative_config={"on_unsupported": "plain"}, **kwargs, **LOOKUP
        )
    assert output.tolist() == expected.tolist()
    assert ours.got == plain.got


def test_a_draft_model_that_cannot_roll_back() -> None:
    refused(errors.UnsupportedModelError, "MambaForCausalLM", speculative_mode="assistant", assistant_model=mamba())


def tiny_t5() -> Any:
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("mode", ["early_exit", "medusa"])
def test_modes_for_decoder_only_models_name_an_encoder_decoder(mode: str) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        run(tiny_t5(), prompt(), max_new_tokens=3, speculative_mode=mode)


def test_a_draft_model_that_is_an_encoder_decoder() -> None:
    refused(
        errors.UnsupportedModelError,
        "T5ForConditionalGeneration is an encoder-decoder",
        speculative_mode="assistant",
        assistant_model=tiny_t5(),
    )


def test_dropout_in_training_mode() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    model.train()
    with pytest.raises(errors.UnsupportedModelError, match=r"model\.eval\(\)"):
        run(model, prompt(), max_new_tokens=3, **LOOKUP)
    assert model.training


def test_training_after_first_use_is_noticed_and_moves_no_generator() -> None:
    model = tiny_model("llama", attention_dropout=0.3)
    run(model, prompt(), max_new_tokens=3, **LOOKUP)
    model.train()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(errors.UnsupportedModelError, match=r"model\.eval\(\)"):
        model.generate(**prompt(), max_new_tokens=3, **LOOKUP)
    assert torch.equal(torch.get_rng_state(), before)


def test_cache_layers_of_an_unknown_kind_are_refused() -> None:
    """They may hold more than keys and values (an index, say), which nobody here would roll back."""
    from hf_specdec.target import kv_cache as kv

    class WithAnIndex(transformers.cache_utils.DynamicLayer):
        pass

    cache = transformers.DynamicCache(config=model_of("llama").config)
    kv.check_rollback(cache, "Known", total_slots=8)
    cache.layers[1] = WithAnIndex()
    with pytest.raises(errors.UnsupportedCacheError, match="Layer 1 of the cache of Odd is a WithAnIndex"):
        kv.check_rollback(cache, "Odd", total_slots=8)


def test_keys_chosen_by_what_else_is_scored_are_refused() -> None:
    """Doge keeps the best `keep_window_size` keys of a forward: a block chooses otherwise than single steps."""
    model = tiny_model("llama", seed=12, keep_window_size=8)
    with pytest.raises(errors.UnsupportedModelError, match="choose the keys they attend to"):
        run(model, prompt(), max_new_tokens=3, **LOOKUP)


def test_a_model_that_fails_in_the_self_test_is_named() -> None:
    model = tiny_model("llama", seed=11)
    original = model.forward

    def fragile(*args: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        if input_ids.shape[1] == 1:
            raise RuntimeError("no single steps")
        return original(*args, input_ids=input_ids, **kwargs)

    model.forward = fragile
    with pytest.raises(errors.UnsupportedModelError, match="self-test with RuntimeError: no single steps"):
        run(model, prompt(), max_new_tokens=3, **LOOKUP)


def test_a_model_that_ignores_the_cache_is_found_by_the_self_test() -> None:
    """Its scores for a block differ from those of the tokens one by one: silently wrong, were it not tested."""
    model = tiny_model("llama", seed=9)
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def shortsighted(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if 1 < hidden_states.shape[1] <= 4:  # any block that is not the whole text
            hidden_states = hidden_states.flip(1)
        return original(hidden_states, **kwargs)

    attention.forward = shortsighted
    with pytest.raises(errors.UnsupportedModelError, match="self-test"):
        run(model, prompt(), max_new_tokens=4, **LOOKUP)


def test_a_model_that_ignores_tree_masks_gets_chains() -> None:
    from hf_specdec.target.selftest import support

    model = tiny_model("llama", seed=10)
    inner = model.model
    original = inner.forward

    def deaf(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = None
        return original(*args, attention_mask=attention_mask, **kwargs)

    inner.forward = deaf
    found = support(model)
    assert not found.trees
    assert "self-test" in found.why
    drafter = ScriptedDrafter(lambda row, text: ([5, 6, 7], [0, 0, 1]))
    stats = assert_same(
        model,
        prompt(),
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 3}},
        max_new_tokens=8,
        eos_token_id=None,
    )
    assert all(parents == list(range(-1, len(parents) - 1)) for draft in drafter.drafts for parents in draft.parents)
    assert max(stats.widths) == 3


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")
@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_peft_methods_that_put_tokens_before_the_prompt(method: str) -> None:
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    model = tiny_model("llama")
    kind = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}[method]
    tuned = get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    expected, _ = run(tuned, prompt(2, padding=3), max_new_tokens=8)
    with pytest.raises(errors.UnsupportedModelError, match=r"prepare_inputs_for_generation.*prefix tuning"):
        run(tuned, prompt(2, padding=3), max_new_tokens=8, **LOOKUP)
    with pytest.warns(UserWarning, match="Decoding plainly"):
        output, _ = run(
            tuned, prompt(2, padding=3), max_new_tokens=8, **LOOKUP, speculative_config={"on_unsupported": "plain"}
        )
    assert output.tolist() == expected.tolist()
    # PEFT leaves the model's own method on the object: that is no replacement
    assert_same(model, prompt(), LOOKUP, max_new_tokens=8)
