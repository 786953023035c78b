"""Every option of transformers' `GenerationConfig`: the text of plain generate, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, letter_tokenizer, model_of, prompt, refused, run
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from hf_specdec.errors import SpeculationError

SAMPLED = {"do_sample": True}
# option -> calls in which it matters
SAME: dict[str, list[dict[str, Any]]] = {
    "max_length": [{"max_length": 25, "max_new_tokens": None}],
    "max_new_tokens": [{"max_new_tokens": 9}],
    "min_length": [{"min_length": 20, "eos_token_id": list(range(3, 60))}],
    "min_new_tokens": [{"min_new_tokens": 7, "eos_token_id": list(range(3, 60))}],
    "max_time": [{"max_time": 1000.0}],
    "stop_strings": [{"stop_strings": ["a", "b", "zz"], "tokenizer": letter_tokenizer()}],
    "do_sample": [SAMPLED],
    "num_beams": [{"num_beams": 1}],
    "use_cache": [{"use_cache": True}],
    "cache_implementation": [{"cache_implementation": kind} for kind in ("dynamic", "static")],
    "cache_config": [{"cache_implementation": "static", "cache_config": {"max_cache_len": 40}}],
    "max_cache_len": [{"cache_implementation": "static", "max_cache_len": 64}],
    "temperature": [{**SAMPLED, "temperature": 0.5}],
    "top_k": [{**SAMPLED, "top_k": 4}],
    "top_p": [{**SAMPLED, "top_p": 0.6}],
    "min_p": [{**SAMPLED, "min_p": 0.05}],
    "top_h": [{**SAMPLED, "top_h": 0.5}],
    "typical_p": [{**SAMPLED, "typical_p": 0.6}],
    "epsilon_cutoff": [{**SAMPLED, "epsilon_cutoff": 0.01}],
    "eta_cutoff": [{**SAMPLED, "eta_cutoff": 0.01}],
    "repetition_penalty": [{"repetition_penalty": 1.5}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 2}],
    "bad_words_ids": [{"bad_words_ids": [[7], [8, 9]]}],
    "renormalize_logits": [{**SAMPLED, "top_k": 5, "renormalize_logits": True}],
    "forced_bos_token_id": [{"forced_bos_token_id": 5}],
    "forced_eos_token_id": [{"forced_eos_token_id": 5}],
    "remove_invalid_values": [{"remove_invalid_values": True}],
    "exponential_decay_length_penalty": [{"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 2}],
    "suppress_tokens": [{"suppress_tokens": list(range(5, 40))}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": list(range(5, 40))}],
    "sequence_bias": [{"sequence_bias": [[[7], 5.0], [[8, 9], -5.0]]}],
    "guidance_scale": [{"guidance_scale": 1.4, "batch": 1}],
    "watermarking_config": [{"watermarking_config": WatermarkingConfig(bias=2.0)}],
    "num_return_sequences": [{**SAMPLED, "num_return_sequences": 2}],
    **{
        name: [{name: True, "return_dict_in_generate": True}]
        for name in ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
    },
    "return_dict_in_generate": [{"return_dict_in_generate": True}],
    "pad_token_id": [{"pad_token_id": 4, "eos_token_id": list(range(3, 30))}],
    "bos_token_id": [{"bos_token_id": 6, "inputs": {}}],
    "eos_token_id": [{"eos_token_id": list(range(3, 30))}],
    "compile_config": [{"compile_config": CompileConfig()}],
    "disable_compile": [{"disable_compile": True, "cache_implementation": "static"}],
    "prefill_chunk_size": [{"prefill_chunk_size": 5}],
    # of encoders
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 1.5, "model": "t5"}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 2, "model": "t5"}],
    "decoder_start_token_id": [{"decoder_start_token_id": 9, "model": "t5"}],
    # of beams and of drafting by transformers' own: without effect where there are none
    "early_stopping": [{"early_stopping": True}],
    "length_penalty": [{"length_penalty": 2.0}],
    "is_assistant": [{"is_assistant": True, "return_dict_in_generate": True, "output_scores": True}],
    "num_assistant_tokens": [{"num_assistant_tokens": 3}],
    "num_assistant_tokens_schedule": [{"num_assistant_tokens_schedule": "constant"}],
    "assistant_confidence_threshold": [{"assistant_confidence_threshold": 0.3}],
    "max_matching_ngram_size": [{"max_matching_ngram_size": 2}],
    "assistant_lookbehind": [{"assistant_lookbehind": 4}],
    "target_lookbehind": [{"target_lookbehind": 4}],
    "assistant_ensemble_weight": [{"assistant_ensemble_weight": 0.5}],
    "speculation_type": [{"speculation_type": "dflash"}],
    "low_memory": [{"low_memory": True}],
    "continuous_batching_config": [{"continuous_batching_config": None}],
    "transformers_version": [],
}
# option -> (a call with it, what the error names)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 3}, "num_beams=3"),
    "use_cache": ({"use_cache": False}, "use_cache=False"),
    "cache_implementation": ({"cache_implementation": "quantized"}, "quantized"),
    "token_healing": ({"token_healing": True}, "token_healing"),
    "use_mtp": ({"use_mtp": True}, "use_mtp"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assistant_early_exit"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "dola_layers": ({"dola_layers": "low"}, "dola_layers"),
    "diversity_penalty": ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beams=2"),
    "num_beam_groups": ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beams=2"),
    "constraints": ({"constraints": ["any"]}, "constraints"),
    "force_words_ids": ({"force_words_ids": [[5]]}, "force_words_ids"),
}


def test_every_option_is_tried() -> None:
    options = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert options <= SAME.keys() | REFUSED.keys()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead"])
@pytest.mark.parametrize("name", SAME)
def test_the_text_of_plain_generate(name: str, mode: str) -> None:
    if not hasattr(GenerationConfig(), name):
        pytest.skip(f"this version of transformers has no {name}")
    for call in SAME[name]:
        decoding = {"max_new_tokens": 16, "eos_token_id": None, **call}
        model = model_of(decoding.pop("model", "llama"))
        inputs = decoding.pop("inputs", prompt(decoding.pop("batch", 2), padding=2, repeat=True))
        asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
        assert_same(model, inputs, asked, **decoding)
        assert_same(model, inputs, asked, **{**decoding, "do_sample": True})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    if not hasattr(GenerationConfig(), name):
        pytest.skip(f"this version of transformers has no {name}")
    call, match = REFUSED[name]
    refused(SpeculationError, match, **call)


def test_the_options_change_the_text() -> None:
    """Otherwise equality would show little."""
    model, inputs, changed = model_of("llama"), prompt(2, padding=2, repeat=True), set()
    for name, calls in SAME.items():
        for call in calls:
            if {"model", "inputs", "batch", "tokenizer", "return_dict_in_generate"} & call.keys():
                continue
            plain = {"max_new_tokens": 16, "eos_token_id": None}
            if "do_sample" in call and name != "do_sample":
                plain["do_sample"] = True
            if not torch.equal(run(model, inputs, **plain)[0], run(model, inputs, **{**plain, **call})[0]):
                changed.add(name)
    assert {"top_k", "top_p", "min_p", "typical_p", "temperature", "repetition_penalty", "suppress_tokens"} <= changed
    assert {"sequence_bias", "no_repeat_ngram_size", "watermarking_config", "min_length", "eta_cutoff"} <= changed
