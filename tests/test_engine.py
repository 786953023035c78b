"""The round itself: trees, ragged rows, exact counts of forwards, exceptions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import CHAINS_ONLY, assert_same, model_of, noisy_trees, prompt, run, texts_of
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.decoding.control import AdaptiveController
from hf_specdec.testing import ScriptedDrafter, tiny_model_names

MODELS = tiny_model_names(with_encoder=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("do_sample", [False, True])
def test_trees_full_of_wrong_turns(name: str, batch: int, do_sample: bool) -> None:
    model, inputs = model_of(name), prompt(batch, length=14, padding=3)
    texts = texts_of(model, inputs, max_new_tokens=48, do_sample=do_sample, eos_token_id=None)
    ends = [None, texts[batch - 1][-20]]  # with an EOS, some rows end early
    for seed, eos in enumerate(ends * 2):
        drafter = noisy_trees(texts, seed=seed, chains=name in CHAINS_ONLY)
        stats = assert_same(
            model,
            inputs,
            {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 24}},
            max_new_tokens=48,
            do_sample=do_sample,
            eos_token_id=eos,
        )
        if eos is None:
            assert stats.mean_acceptance_length > 1.2, "the drafts were meant to be right now and then"


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_alibi"])
def test_trees_on_a_static_cache(name: str) -> None:
    settings = {"sliding_window": 96} if name == "gemma3" else {}
    cache = "static" if name != "falcon_alibi" else None
    model, inputs = model_of(name, **settings), prompt(4, length=14, padding=3)
    texts = texts_of(model, inputs, max_new_tokens=40, eos_token_id=None)
    for seed in range(4):
        assert_same(
            model,
            inputs,
            {"speculative_mode": noisy_trees(texts, seed=seed), "speculative_config": {"num_draft_tokens": 16}},
            max_new_tokens=40,
            cache_implementation=cache,
            eos_token_id=texts[1][-15],
        )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trees_in_float64_and_under_eager_attention(name: str) -> None:
    for settings in ({"dtype": torch.float64}, {"attn_implementation": "eager"}):
        model, inputs = model_of(name, **settings), prompt(3, length=14, padding=3)
        texts = texts_of(model, inputs, max_new_tokens=40)
        asked = {"speculative_mode": noisy_trees(texts), "speculative_config": {"num_draft_tokens": 16}}
        assert_same(model, inputs, asked, max_new_tokens=40)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 13, 24])
def test_a_drafter_that_is_always_right(name: str, width: int, tokens: int) -> None:
    """The prompt's forward brings one token, every round after it `width` of them: ceil of tokens / draft width."""
    model, inputs = model_of(name), prompt()
    texts = texts_of(model, inputs, max_new_tokens=tokens, eos_token_id=None)
    drafter = ScriptedDrafter.knowing(texts, width - 1)
    stats = assert_same(
        model,
        inputs,
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": width - 1}},
        max_new_tokens=tokens,
        eos_token_id=None,
    )
    assert stats.rounds == math.ceil((tokens - 1) / width)
    assert stats.target_forwards == 1 + stats.rounds
    assert stats.tokens == tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafter_that_always_lies(name: str, batch: int) -> None:
    model, inputs = model_of(name), prompt(batch, padding=2)
    texts = texts_of(model, inputs, max_new_tokens=15, eos_token_id=None)
    drafter = ScriptedDrafter.lying(texts, 4, vocab_size=97)
    stats = assert_same(
        model,
        inputs,
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 4}},
        max_new_tokens=15,
        eos_token_id=None,
    )
    assert stats.rounds == 14
    assert stats.acceptance_rate == 0.0
    assert stats.mean_acceptance_length == 1.0
    assert stats.histogram == {0: 14 * batch}


@pytest.mark.parametrize("name", MODELS)
def test_empty_drafts_are_plain_steps(name: str) -> None:
    stats = assert_same(
        model_of(name),
        prompt(2, padding=2),
        {"speculative_mode": ScriptedDrafter(lambda row, text: []), "speculative_config": {"num_draft_tokens": 4}},
        max_new_tokens=12,
        eos_token_id=None,
    )
    assert stats.widths == {1: 11}
    assert stats.mean_acceptance_length == 1.0


def test_rows_advance_at_their_own_pace() -> None:
    """One row's drafts are right, the other's are wrong: the first must not wait for the second."""
    model, inputs = model_of("llama"), prompt(2, padding=3)
    texts = texts_of(model, inputs, max_new_tokens=25, eos_token_id=None)
    drafter = ScriptedDrafter(lambda row, text: texts[row][len(text) : len(text) + 3] if row == 0 else [96, 96])
    stats = assert_same(
        model,
        inputs,
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 3}},
        max_new_tokens=25,
        eos_token_id=None,
    )
    assert stats.rows[0].rounds == 6
    assert stats.rows[1].rounds > 20


def test_unknown_processors_keep_the_batch_in_step() -> None:
    """A processor of the user's may look across rows, so it sees the batch as plain decoding shows it."""

    class AcrossRows(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores + 0.5 * scores.mean(0, keepdim=True).roll(int(input_ids[:, -1].sum()) % 7, dims=1)

    model, inputs = model_of("llama"), prompt(3, padding=2)
    processors = LogitsProcessorList([AcrossRows()])
    texts = texts_of(model, inputs, max_new_tokens=24, logits_processor=processors)
    for do_sample in (False, True):
        stats = assert_same(
            model,
            inputs,
            {"speculative_mode": noisy_trees(texts), "speculative_config": {"num_draft_tokens": 12}},
            max_new_tokens=24,
            logits_processor=processors,
            do_sample=do_sample,
        )
        assert stats.tokens > 24


def test_a_processor_that_draws_from_the_generator() -> None:
    """Its draws come between those of sampling, so no noise may be drawn ahead of it."""

    class Noisy(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return scores + torch.randn(scores.shape)

    for speculation in (
        {"speculative_mode": "prompt_lookup"},
        {"speculative_mode": "assistant", "assistant_model": model_of("llama", num_hidden_layers=2)},
    ):
        assert_same(
            model_of("llama"),
            prompt(repeat=True),
            {**speculation, "speculative_config": {"num_draft_tokens": 4}},
            max_new_tokens=16,
            do_sample=True,
            logits_processor=LogitsProcessorList([Noisy()]),
        )


def test_stop_strings() -> None:
    from conftest import letter_tokenizer

    model, tokenizer = model_of("llama"), letter_tokenizer()
    inputs = prompt(2, padding=2)
    texts = texts_of(model, inputs, max_new_tokens=30, eos_token_id=None)
    words = tokenizer.convert_ids_to_tokens(texts[0][-18:-16])
    for stop in ([words[1]], ["".join(words)]):
        for mode in (noisy_trees(texts), "prompt_lookup"):
            stats = assert_same(
                model,
                inputs,
                {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 8}},
                max_new_tokens=30,
                stop_strings=stop,
                tokenizer=tokenizer,
            )
            assert stats.rows[0].tokens < 30, "the stop string was meant to occur"


def test_stop_strings_from_the_generation_config_of_the_model() -> None:
    from conftest import letter_tokenizer

    model, tokenizer = model_of("llama", seed=5), letter_tokenizer()
    inputs = prompt()
    word = tokenizer.convert_ids_to_tokens(texts_of(model, inputs, max_new_tokens=20, eos_token_id=None)[0][-9])
    model.generation_config.stop_strings = [word]
    try:
        stats = assert_same(
            model, inputs, {"speculative_mode": "prompt_lookup"}, max_new_tokens=20, tokenizer=tokenizer
        )
        assert stats.tokens < 20
        assert model.generation_config.stop_strings == [word]
    finally:
        model.generation_config.stop_strings = None


def test_max_time_ends_the_call() -> None:
    inputs = prompt()
    output, _ = run(
        model_of("llama"), inputs, max_new_tokens=200, max_time=0.0, eos_token_id=None, speculative_mode="prompt_lookup"
    )
    assert output.shape[1] == 13  # one token, then the clock is looked at


@pytest.mark.parametrize("drafts_for_free", [False, True])
def test_who_drafts_for_free_is_asked_while_drafting_does_not_pay(
    drafts_for_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_budget = AdaptiveController.budget
    monkeypatch.setattr(
        AdaptiveController, "budget", lambda *arguments: replace(plain_budget(*arguments), free_only=True)
    )
    model, inputs = model_of("llama"), prompt(1)
    asked = []

    class Asked(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Any:
            asked.append(budget.free_only)
            return super().propose(context, budget)

    drafter = Asked(lambda row, text: [])
    drafter.drafts_for_free = drafts_for_free
    assert_same(model, inputs, {"speculative_mode": drafter}, max_new_tokens=6, eos_token_id=None)
    assert asked == ([True] * 4 if drafts_for_free else [])  # the last token is never drafted


@pytest.mark.parametrize("mode", ["prompt_lookup", "assistant"])
@pytest.mark.parametrize("batch", [1, 2])
def test_criteria_and_streamers_that_draw_from_the_generator(mode: str, batch: int) -> None:
    class Drawing(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.rand(input_ids.shape[0]) < 0.05

    class DrawingStreamer:
        def put(self, value: torch.Tensor) -> None:
            torch.rand(2)

        def end(self) -> None:
            torch.rand(1)

    asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
    if mode == "assistant":
        asked["assistant_model"] = model_of("llama", num_hidden_layers=2)
    extras: list[dict[str, Any]] = [{"stopping_criteria": StoppingCriteriaList([Drawing()])}]
    if batch == 1:
        extras.append({"streamer": DrawingStreamer()})
    for extra in extras:
        assert_same(model_of("llama"), prompt(batch, repeat=True), asked, max_new_tokens=24, do_sample=True, **extra)


def test_prompts_of_int32_come_back_as_plain_generate_returns_them() -> None:
    inputs = prompt(repeat=True)
    inputs["input_ids"] = inputs["input_ids"].int()
    plain, _ = run(model_of("llama"), inputs, max_new_tokens=8)
    ours, _ = run(model_of("llama"), inputs, max_new_tokens=8, speculative_mode="prompt_lookup")
    assert ours.dtype == plain.dtype
    assert ours.tolist() == plain.tolist()


def test_passengers_are_scored_but_never_accepted() -> None:
    model, inputs = model_of("llama"), prompt()
    texts = texts_of(model, inputs, max_new_tokens=12, eos_token_id=None)

    class Riding(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Any:
            text = context.tokens[0]
            truth = texts[0][len(text) : len(text) + 2]
            draft = hf_specdec.Draft.chains(context.roots, [truth])
            riders = [[False] + [True] * len(truth)]
            return hf_specdec.Draft(draft.tokens, draft.parents, passenger=riders)

    drafter = Riding(lambda row, text: [])
    stats = assert_same(
        model,
        inputs,
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 2}},
        max_new_tokens=12,
        eos_token_id=None,
    )
    assert stats.histogram == {0: 11}
    assert max(stats.widths) == 3


def test_the_context_limit_of_learned_positions_is_not_run_over() -> None:
    """Drafts near the last position are cut, so the text goes exactly as far as plain decoding's."""
    for name in ("gpt2", "opt"):
        settings = {"n_positions": 24} if name == "gpt2" else {}
        settings["max_position_embeddings"] = 24
        model, inputs = model_of(name, **settings), prompt(2, length=12, padding=2, repeat=True)
        texts = texts_of(model, inputs, max_new_tokens=12, eos_token_id=None)

        def past_the_end(row: int, text: list[int], texts: list[list[int]] = texts) -> tuple[list[int], list[int]]:
            return [*texts[row][len(text) :], 5, 5, 5, 5, 5, 5][:6], list(range(6))  # a tree: not cut by the drafter

        drafter = ScriptedDrafter(past_the_end)
        assert_same(
            model,
            inputs,
            {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 6}},
            max_new_tokens=12,
            eos_token_id=None,
        )


def test_holes_are_squeezed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.target import kv_cache

    model = model_of("llama")
    realigned = []
    original = kv_cache.realign
    monkeypatch.setattr(kv_cache, "realign", lambda *args: (realigned.append(args), original(*args))[1])
    inputs = prompt(2, length=6)
    texts = texts_of(model, inputs, max_new_tokens=60, eos_token_id=None)
    turn = [0]

    def alternate(row: int, text: list[int]) -> list[int]:
        mine = turn[0] % 2 == row
        turn[0] += row == 1
        return texts[row][len(text) : len(text) + 5] if mine else [96]

    assert_same(
        model,
        inputs,
        {"speculative_mode": ScriptedDrafter(alternate), "speculative_config": {"num_draft_tokens": 5}},
        max_new_tokens=60,
        eos_token_id=None,
    )
    assert realigned
