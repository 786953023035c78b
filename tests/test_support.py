"""What models can take part in: trees, chains, windows, masks with gaps, half precision."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, model_of, noisy_trees, prompt, run, texts_of

from hf_specdec.host.modules import watching_hook
from hf_specdec.target.selftest import support


def test_positions_counted_by_the_cache_keep_the_batch_in_step() -> None:
    """TrOCR's decoder takes no positions and counts them by its cache, so no row may be moved in it."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.TrOCRConfig(
            vocab_size=97,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=128,
            init_std=0.3,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dropout=0.0,
        )
        model = transformers.TrOCRForCausalLM(config).eval()
    assert not support(model).movable
    inputs = prompt(3, length=8)
    texts = texts_of(model, inputs, max_new_tokens=24, eos_token_id=None)
    for chains in (True, False):
        assert_same(
            model,
            inputs,
            {"speculative_mode": noisy_trees(texts, chains=chains), "speculative_config": {"num_draft_tokens": 8}},
            max_new_tokens=24,
            eos_token_id=None,
        )


def test_support_is_tested_once_and_remembered() -> None:
    from hf_specdec.testing import tiny_model

    model = tiny_model("llama", seed=3)
    calls = []
    handle = watching_hook(model, lambda *args: calls.append(1))
    first = support(model)
    assert first.trees
    assert 0 < len(calls) <= 12, "the self-test is meant to be cheap"
    seen = len(calls)
    assert support(model) is first
    assert len(calls) == seen
    handle.remove()


IGNORE_TREES = {
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 3, "n_heads": 4, "expansion_ratio": 2, "use_cache": True}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "intermediate_size": 48,
        },
    ),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
}


@pytest.mark.parametrize("name", IGNORE_TREES)
@pytest.mark.parametrize("batch", [1, 3])
def test_models_that_cannot_take_trees_get_chains(name: str, batch: int) -> None:
    """Some refuse a tree mask, some ignore it silently; none may change a token."""
    import transformers

    config_name, settings = IGNORE_TREES[name]
    common = {"vocab_size": 97, "hidden_size": 32, "initializer_range": 0.3, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(**common, bos_token_id=1, eos_token_id=2, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert not support(model).trees
    inputs = prompt(batch, length=14, padding=3)
    for do_sample in (False, True):
        texts = texts_of(model, inputs, max_new_tokens=30, do_sample=do_sample, eos_token_id=None)
        stats = assert_same(
            model,
            inputs,
            {"speculative_mode": noisy_trees(texts, chains=True), "speculative_config": {"num_draft_tokens": 8}},
            max_new_tokens=30,
            do_sample=do_sample,
            eos_token_id=None,
        )
        assert stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_bfloat16_differs_only_at_near_ties(name: str) -> None:
    """A block and a single token round differently in bfloat16; where that changes the text, the two candidates must
    have been within rounding of one another."""
    model, inputs = model_of(name, dtype=torch.bfloat16), prompt(length=14)
    plain, _ = run(
        model, inputs, max_new_tokens=40, eos_token_id=None, return_dict_in_generate=True, output_logits=True
    )
    texts = [plain.sequences[0].tolist()]
    for seed in range(4):
        ours, _ = run(
            model,
            inputs,
            max_new_tokens=40,
            eos_token_id=None,
            speculative_mode=noisy_trees(texts, seed=seed),
            speculative_config={"num_draft_tokens": 12},
        )
        differ = (ours[0] != plain.sequences[0]).nonzero()
        if len(differ):
            step = int(differ[0]) - 14
            first, second = plain.logits[step][0].topk(2).values.tolist()
            assert first - second <= 2**-5 * abs(first), "not a near tie"


def test_a_window_that_the_model_leaves_to_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moshi makes a plain causal mask and lets the cache forget; a block would see more than each of its tokens."""
    from transformers.models.mistral import modeling_mistral

    from hf_specdec.testing import tiny_model

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", modeling_mistral.create_causal_mask)
    model, inputs = tiny_model("mistral", seed=4), prompt(length=14)
    texts = texts_of(model, inputs, max_new_tokens=30, eos_token_id=None)
    for seed in range(3):
        assert_same(
            model,
            inputs,
            {
                "speculative_mode": noisy_trees(texts, seed=seed, chains=True),
                "speculative_config": {"num_draft_tokens": 6},
            },
            max_new_tokens=30,
            eos_token_id=None,
        )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("where", ["right", "inside"])
def test_masks_with_gaps(name: str, where: str) -> None:
    """Windows count slots, hidden ones too."""
    for seed in range(3):
        inputs = prompt(2, seed=seed)
        inputs["attention_mask"][0, slice(9, None) if where == "right" else slice(4, 7)] = 0
        texts = texts_of(model_of(name), inputs, max_new_tokens=15, eos_token_id=None)
        drafter = noisy_trees(texts, seed=seed)
        asked = {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 6}}
        assert_same(model_of(name), inputs, asked, max_new_tokens=15, eos_token_id=None)
