"""Bad input: its own error, before the model runs, naming culprit and remedy; nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import LOOKUP, assert_same, model_of, prompt, refused, run
from transformers import GenerationConfig, StoppingCriteriaList

import hf_specdec
from hf_specdec import errors
from hf_specdec.target.selftest import support
from hf_specdec.testing import ScriptedDrafter, tiny_model


def test_unknown_mode_lists_the_known_ones() -> None:
    refused(errors.UnknownModeError, "'medussa'.*assistant.*prompt_lookup", speculative_mode="medussa")
    refused(errors.UnknownModeError, "7", speculative_mode=7)
    refused(
        errors.UnknownModeError,
        r"class PromptLookupDrafter; pass an object",
        speculative_mode=hf_specdec.PromptLookupDrafter,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_drafts": 3}, "'num_drafts'.*num_draft_tokens"),
        ({"num_draft_tokens": "three"}, "num_draft_tokens must be a whole number or 'auto', got 'three'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0, got -1"),
        ({"num_draft_tokens": True}, "num_draft_tokens"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens"),
        ({"acceptance": "lucky"}, "acceptance must be 'coupled' or 'rejection' or 'typical'"),
        ({"max_match_length": 0}, "max_match_length must be at least 1"),
        ({"typical_epsilon": 2.0}, "typical_epsilon must be between 0.0 and 1.0"),
        ({"typical_delta": float("nan")}, "typical_delta"),
        ({"draft_sampling": "tape"}, "'draft_sampling' for mode 'prompt_lookup'"),
        (["num_draft_tokens"], "must be a dict or a PromptLookupConfig, got list"),
        (hf_specdec.AssistantConfig(), "must be a dict or a PromptLookupConfig, got AssistantConfig"),
    ],
)
def test_unknown_or_mistyped_settings(settings: Any, message: str) -> None:
    refused(errors.InvalidSettingError, message, speculative_config=settings)


def test_settings_without_a_mode() -> None:
    refused(
        errors.ConflictingArgumentsError, "without a speculative_mode", speculative_mode=None, speculative_config={}
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"contrastive search\. Remove what asks for it \(penalty_alpha\)"),
        ({"dola_layers": "low"}, r"dola generation.*\(dola_layers\)"),
        ({"prompt_lookup_num_tokens": 3}, r"assisted generation.*\(prompt_lookup_num_tokens\)"),
        ({"use_cache": False}, "use_cache=False"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"token_healing": True}, "token_healing"),
    ],
)
def test_ways_of_generating_that_do_not_combine(kwargs: dict[str, Any], message: str) -> None:
    refused(errors.UnsupportedGenerationError, message, **kwargs)


def test_a_prompt_of_embeddings() -> None:
    model = model_of("llama")
    with pytest.raises(errors.UnsupportedGenerationError, match="inputs_embeds"):
        model.generate(inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=3, **LOOKUP)


def test_conflicting_arguments() -> None:
    refused(errors.ConflictingArgumentsError, "custom_generate", custom_generate=lambda **kwargs: None)
    refused(errors.ConflictingArgumentsError, "takes no assistant_model", assistant_model=model_of("llama"))
    refused(errors.ConflictingArgumentsError, "needs assistant_model=", speculative_mode="assistant")
    by_name = {"speculative_mode": "assistant", "assistant_model": "org/draft"}
    refused(errors.ConflictingArgumentsError, "must be a loaded model, got str", **by_name)
    refused(errors.ConflictingArgumentsError, "pass tokenizer=", stop_strings=["x"])


def test_a_draft_model_with_another_vocabulary() -> None:
    other = tiny_model("llama", vocab_size=1500)
    refused(
        errors.IncompatibleVocabularyError,
        "1500 tokens, the target 97",
        speculative_mode="assistant",
        assistant_model=other,
    )


def test_tokenizers_that_differ() -> None:
    from conftest import letter_tokenizer

    mine, other = letter_tokenizer(), letter_tokenizer()
    other.add_tokens(["more"])
    refused(
        errors.IncompatibleVocabularyError,
        "assistant_tokenizer differ",
        speculative_mode="assistant",
        assistant_model=model_of("llama", num_hidden_layers=2),
        tokenizer=mine,
        assistant_tokenizer=other,
    )


@pytest.mark.parametrize("sizes", [(97, 128), (128, 97)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_vocabularies_padded_differently_do_combine(sizes: tuple[int, int], do_sample: bool) -> None:
    target, draft = tiny_model("llama", vocab_size=sizes[0]), tiny_model("llama", vocab_size=sizes[1], seed=1)
    asked = {"speculative_mode": "assistant", "assistant_model": draft, "speculative_config": {"num_draft_tokens": 4}}
    assert_same(target, prompt(2, padding=2), asked, max_new_tokens=20, do_sample=do_sample)
    asked["speculative_config"]["acceptance"] = "rejection"
    run(target, prompt(2, padding=2), max_new_tokens=20, do_sample=do_sample, **asked)


def test_an_empty_prompt() -> None:
    empty = {"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": torch.zeros(1, 0, dtype=torch.long)}
    refused(errors.EmptyPromptError, "empty", inputs=empty)
    hidden = prompt(2)
    hidden["attention_mask"][1] = 0
    refused(errors.EmptyPromptError, "attention_mask", inputs=hidden)


def test_a_prompt_at_the_context_limit() -> None:
    refused(
        errors.ContextLimitError,
        "12 tokens and GPT2LMHeadModel has 12 positions",
        model=model_of("gpt2", max_position_embeddings=12, n_positions=12),
    )


def test_rotary_positions_have_no_such_limit() -> None:
    """Plain generate goes on past what a rotary model was made for, so speculation does too."""
    model = model_of("llama", max_position_embeddings=12)
    assert_same(
        model, prompt(repeat=True), {**LOOKUP, "speculative_config": {"num_draft_tokens": 4}}, max_new_tokens=12
    )


@pytest.mark.parametrize(("kind", "length"), [("longrope", 24), ("dynamic", 20)])
def test_rotary_frequencies_that_change_within_the_text(kind: str, length: int) -> None:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        half = [1.0] * 4
        parameters |= {"short_factor": half, "long_factor": [2.0 * f for f in half]}
        parameters |= {"original_max_position_embeddings": length}
    model = tiny_model(
        "llama", rope_parameters=parameters, max_position_embeddings=2 * length if half_of(kind) else length
    )
    asked = {**LOOKUP, "speculative_config": {"num_draft_tokens": 4}}
    assert_same(model, prompt(3, padding=2, repeat=True), asked, max_length=length)
    with pytest.raises(errors.UnsupportedModelError, match=f"'{kind}'.*{length} tokens"):
        run(model, prompt(repeat=True), max_length=length + 4, **asked)
    expected, _ = run(tiny_model("llama", rope_parameters=parameters), prompt(), max_new_tokens=2)
    assert expected.shape[1] == 14


def half_of(kind: str) -> bool:
    return kind == "longrope"


def test_no_room_for_a_new_token() -> None:
    refused(errors.ContextLimitError, "max_length=12", max_new_tokens=None, max_length=12)


def test_typos_are_named_by_transformers() -> None:
    refused(ValueError, "top_kk", top_kk=3)


def test_an_argument_for_the_model_that_we_would_drop() -> None:
    states = torch.zeros(1, 4, 32)
    support(model_of("gpt2"))
    refused(
        errors.UnsupportedGenerationError,
        "encoder_hidden_states",
        model=model_of("gpt2"),
        encoder_hidden_states=states,
    )


def test_token_types_are_passed_on() -> None:
    types = torch.full((1, 12), 7)
    inputs = {**prompt(repeat=True), "token_type_ids": types}
    expected, _ = run(model_of("gpt2"), inputs, max_new_tokens=20)
    output, _ = run(model_of("gpt2"), inputs, max_new_tokens=20, **LOOKUP)
    assert output.tolist() == expected.tolist()
    without, _ = run(model_of("gpt2"), prompt(repeat=True), max_new_tokens=20)
    assert without.tolist() != expected.tolist()


def test_every_error_is_in_the_tree_drawn_at_the_top() -> None:
    import inspect

    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, Exception):
            assert issubclass(kind, errors.SpeculationError)
            assert name in errors.__doc__, f"{name} is missing from the drawing"


def test_generation_config_given_by_the_user_is_not_touched() -> None:
    given = GenerationConfig(max_new_tokens=5, stop_strings=None, pad_token_id=0, eos_token_id=2)
    before = given.to_dict()
    criteria = StoppingCriteriaList()
    run(model_of("llama"), prompt(), generation_config=given, stopping_criteria=criteria, **LOOKUP)
    assert given.to_dict() == before
    assert len(criteria) == 0


def test_an_error_after_the_model_ran_is_not_answered_with_a_used_cache() -> None:
    class Late(ScriptedDrafter):
        def observe(self, *args: Any) -> None:
            raise errors.UnsupportedModelError("too late")

    late = Late(lambda row, text: [3, 4])
    config = {"on_unsupported": "plain", "num_draft_tokens": 2}
    with pytest.raises(errors.UnsupportedModelError, match="too late"):
        run(model_of("llama"), prompt(), max_new_tokens=8, speculative_mode=late, speculative_config=config)


def test_scores_that_are_not_numbers_raise_as_in_plain_sampling() -> None:
    class Broken(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores if input_ids.shape[1] < 15 else scores * torch.nan

    processors = transformers.LogitsProcessorList([Broken()])
    sampling = {"max_new_tokens": 10, "do_sample": True, "logits_processor": processors}
    for asked in ({}, LOOKUP):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            run(model_of("llama"), prompt(), **sampling, **asked)
