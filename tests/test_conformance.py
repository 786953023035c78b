"""Every registered mode, on every kind of model, against plain generate. A new mode is tested by registering.

What a mode needs besides its name it says where it is registered: a draft model, heads of some kind, settings.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, assert_unchanged, model_of, model_with_heads, prompt, run, snapshot
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.errors import UnsupportedCacheError
from hf_specdec.modes import Request, get_mode
from hf_specdec.testing import tiny_model_names

MODES = hf_specdec.mode_names()
WITH_ENCODER = tiny_model_names(with_encoder=True)
PAIRS = [
    (mode, name)
    for name in tiny_model_names()
    for mode in MODES
    if name not in WITH_ENCODER or get_mode(mode).decoder_only is None
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every mode, on every kind of model where the test takes one."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize(("mode", "name"), PAIRS)
    elif "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", MODES)


def given(name: str, batch: int = 1, **settings: Any) -> dict[str, Any]:
    """`prompt`; for models with an encoder what their decoder goes on with, and sources of different lengths."""
    text = prompt(batch, **settings)
    if name not in WITH_ENCODER:
        return text
    source = prompt(batch, length=10, padding=2, seed=7)
    ids = text["input_ids"].clone()
    ids[0, 0] = 3  # where all rows begin otherwise, transformers puts this token before them
    flipped = {key: value.flip(1) for key, value in source.items()}  # encoders' sources are padded on the right
    return {**flipped, "decoder_input_ids": ids, "decoder_attention_mask": text["attention_mask"]}


def speculation(mode: str, name: str, **config: Any) -> dict[str, Any]:
    """The arguments that ask for a mode on a model."""
    registered = get_mode(mode)
    asked: dict[str, Any] = {"speculative_mode": mode}
    if registered.needs_assistant:
        asked["assistant_model"] = model_of(name, num_hidden_layers=2)
    asked["speculative_config"] = {"num_draft_tokens": 5, **registered.conformance, **config}
    return asked


def target(mode: str, name: str, **settings: Any) -> Any:
    """The model that a mode is tried on."""
    kind = get_mode(mode).needs_heads
    return model_of(name, **settings) if kind is None else model_with_heads(name, kind, **settings)


class Counting(LogitsProcessor):
    """Has a memory: forbids the token it saw chosen three calls ago. Any extra or missing call changes the text."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert not self.seen or input_ids.shape[1] == self.seen[-1].shape[1] + 1
        self.seen.append(input_ids.clone())
        scores = scores.clone()
        if len(self.seen) > 3:
            scores.scatter_(1, self.seen[-3][:, -1:], -torch.inf)
        return scores


class StopAt(StoppingCriteria):
    """Stops a row once it has so many tokens, and notes every length at which it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, dtype=torch.bool)


class Collect:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_same_text(mode: str, name: str, batch: int, do_sample: bool) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1} if do_sample else {}
    assert_same(
        target(mode, name),
        given(name, batch, padding=3, repeat=True),
        speculation(mode, name),
        max_new_tokens=30,
        do_sample=do_sample,
        **sampling,
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_same_text_sized_by_the_controller(mode: str, name: str, batch: int) -> None:
    asked = {**speculation(mode, name), "speculative_config": None}
    assert_same(target(mode, name), given(name, batch, padding=2, repeat=True), asked, max_new_tokens=24)


def test_an_eos_inside_a_draft_ends_the_row(mode: str, name: str) -> None:
    model, inputs = target(mode, name), given(name, 2, padding=2, repeat=True)
    plain, _ = run(model, inputs, max_new_tokens=30)
    # make tokens that the texts hold end-of-sequence tokens: rows end at different times, drafts run past them
    several = sorted({int(plain[0, 12 + 9]), int(plain[1, 12 + 17])})
    for eos in (several, several[0]):
        assert_same(model, inputs, speculation(mode, name), max_new_tokens=30, eos_token_id=eos)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_max_length_inside_a_draft(mode: str, name: str, length: int) -> None:
    assert_same(target(mode, name), given(name, repeat=True), speculation(mode, name), max_new_tokens=length)


def test_streamer_gets_every_token(mode: str, name: str) -> None:
    streamer, plain_streamer = Collect(), Collect()
    inputs = given(name, repeat=True)
    run(target(mode, name), inputs, max_new_tokens=20, streamer=plain_streamer)
    run(target(mode, name), inputs, max_new_tokens=20, streamer=streamer, **speculation(mode, name))
    assert streamer.got == plain_streamer.got
    assert streamer.ended == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_custom_criterion_stops_at_the_very_token(mode: str, name: str, batch: int) -> None:
    for length in (17, 18, 19):
        plain, ours = StopAt(length), StopAt(length)
        inputs = given(name, batch, padding=2, repeat=True)
        expected, _ = run(
            target(mode, name),
            inputs,
            max_new_tokens=30,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([plain]),
        )
        output, _ = run(
            target(mode, name),
            inputs,
            max_new_tokens=30,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([ours]),
            **speculation(mode, name),
        )
        assert output.tolist() == expected.tolist()
        assert ours.asked == plain.asked == list(range(13, length + 1))


@pytest.mark.parametrize("batch", [1, 2])
def test_stateful_processor_sees_every_token_once(mode: str, name: str, batch: int) -> None:
    inputs = given(name, batch, padding=2, repeat=True)
    outputs, seen = [], []
    for asked in ({}, speculation(mode, name)):
        processor = Counting()
        output, _ = run(
            target(mode, name), inputs, max_new_tokens=24, logits_processor=LogitsProcessorList([processor]), **asked
        )
        outputs.append(output.tolist())
        seen.append([ids.tolist() for ids in processor.seen])
    assert outputs[0] == outputs[1]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("batch", [1, 2])
def test_prefix_allowed_tokens_fn(mode: str, name: str, batch: int) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [3 + row, 4 + row, 5, 6, 7 + int(ids[-1]) % 3]

    assert_same(
        target(mode, name),
        given(name, batch, repeat=True),
        speculation(mode, name),
        max_new_tokens=20,
        prefix_allowed_tokens_fn=allowed,
    )


@pytest.mark.parametrize("do_sample", [False, True])
def test_guidance_scale(mode: str, name: str, do_sample: bool) -> None:
    if name == "t5":
        # guidance asks the decoder alone for its scores, and T5's takes none of the arguments
        with pytest.raises(ValueError, match="input_ids"):
            run(target(mode, name), given(name), max_new_tokens=16, guidance_scale=1.5)
        return
    assert_same(
        target(mode, name),
        given(name, 1, repeat=True),
        speculation(mode, name),
        max_new_tokens=16,
        guidance_scale=1.5,
        do_sample=do_sample,
    )


def test_rows_finish_at_different_times_and_pad_as_plain_does(mode: str, name: str) -> None:
    model, inputs = target(mode, name), given(name, 4, padding=1, repeat=True)
    plain, _ = run(model, inputs, max_new_tokens=40, eos_token_id=None)
    eos = [int(plain[0, 12 + 4]), int(plain[2, 12 + 11])]
    output, _ = run(model, inputs, max_new_tokens=40, eos_token_id=eos)
    for do_sample in (False, True):
        assert_same(model, inputs, speculation(mode, name), max_new_tokens=40, eos_token_id=eos, do_sample=do_sample)
    lengths = (output[:, 12:] != 0).sum(1).tolist()
    assert len(set(lengths)) > 1, "the rows were meant to finish at different times"


def test_two_calls_in_a_row_leave_the_model_as_it_was(mode: str, name: str) -> None:
    model = target(mode, name)
    before = snapshot(model)
    for length in (9, 14):
        assert_same(model, given(name, length=length, repeat=True), speculation(mode, name), max_new_tokens=12)
    assert_unchanged(model, before)


def test_static_cache(mode: str, name: str) -> None:
    model, inputs = target(mode, name), given(name, 3, padding=2, repeat=True)
    # the window of the sliding models is smaller than the text: what left it cannot be brought back
    if getattr(model.config, "sliding_window", None) is not None:
        with pytest.raises(UnsupportedCacheError, match="StaticSlidingWindowLayer"):
            run(model, inputs, max_new_tokens=20, cache_implementation="static", **speculation(mode, name))
        model = target(mode, name, sliding_window=64)
    if name == "falcon_alibi":
        # falcon builds its alibi from a 2-D mask, and a static cache comes with a 4-D one
        with pytest.raises(ValueError, match="unpack"):
            run(model, inputs, max_new_tokens=20, cache_implementation="static")
        return
    for batch in (1, 3):
        assert_same(
            model,
            given(name, batch, padding=2, repeat=True),
            speculation(mode, name),
            max_new_tokens=20,
            cache_implementation="static",
        )


@pytest.mark.parametrize("batch", [1, 2])
def test_num_return_sequences(mode: str, name: str, batch: int) -> None:
    assert_same(
        target(mode, name),
        given(name, batch, padding=2),
        speculation(mode, name),
        max_new_tokens=14,
        do_sample=True,
        num_return_sequences=2,
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_back_ends(mode: str, attention: str) -> None:
    for name in ("llama", "gemma3", "gpt2"):
        model = target(mode, name, attn_implementation=attention)
        assert model.config._attn_implementation == attention
        assert_same(model, prompt(2, padding=3, repeat=True), speculation(mode, name), max_new_tokens=24)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cache", [None, "static"])
def test_returned_dict_is_that_of_plain_generate(mode: str, name: str, batch: int, cache: str | None) -> None:
    if cache == "static" and name == "falcon_alibi":
        pytest.skip("plain generate does not run falcon with alibi on a static cache (see test_static_cache)")
    model = target(mode, name, attn_implementation="eager")
    if cache == "static" and getattr(model.config, "sliding_window", None) is not None:
        model = target(mode, name, attn_implementation="eager", sliding_window=64)
    inputs = given(name, batch, padding=2, repeat=True)
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "max_new_tokens": 16,
        "cache_implementation": cache,
        "repetition_penalty": 1.2,
    }
    eos = int(run(model, inputs, max_new_tokens=16)[0][-1, 12 + 5])  # one row ends before the other
    for do_sample in (False, True):
        plain, _ = run(model, inputs, do_sample=do_sample, eos_token_id=eos, **wanted)
        ours, _ = run(model, inputs, do_sample=do_sample, eos_token_id=eos, **wanted, **speculation(mode, name))
        assert type(ours) is type(plain)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        assert ours.speculation.tokens > 0
        for field in ("scores", "logits"):
            for mine, theirs in zip(getattr(ours, field), getattr(plain, field), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        part = "decoder_" if name in WITH_ENCODER else ""
        fields = [f"{part}hidden_states", f"{part}attentions", *["cross_attentions"][: name in WITH_ENCODER]]
        for field in fields:
            for mine, theirs in zip(getattr(ours, field), getattr(plain, field), strict=True):
                for mine_layer, their_layer in zip(mine, theirs, strict=True):
                    size = max(1.0, float(their_layer.abs().max()))
                    torch.testing.assert_close(mine_layer, their_layer, rtol=1e-3, atol=1e-4 * size)


def test_returned_cache_can_be_continued(mode: str, name: str) -> None:
    from hf_specdec.host.generate import CACHE_KEY

    model, inputs = target(mode, name), given(name, repeat=True)
    wanted = {"return_dict_in_generate": True, "max_new_tokens": 11}
    results = []
    for asked in ({}, speculation(mode, name)):
        first, _ = run(model, inputs, **wanted, **asked)
        cache = getattr(first, CACHE_KEY)
        assert int(cache.get_seq_length()) == first.sequences.shape[1] - 1
        again = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences), CACHE_KEY: cache}
        second, _ = run(model, again, max_new_tokens=9, **asked)
        results.append(second.tolist())
    assert results[0] == results[1]


def test_settings_travel_with_the_generation_config(mode: str, tmp_path: Any) -> None:
    model = target(mode, "llama")
    asked = speculation(mode, "llama")
    generation_config = GenerationConfig(max_new_tokens=12, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    hf_specdec.configure(generation_config, mode, {"num_draft_tokens": 3})
    generation_config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.speculative_mode == mode
    assert loaded.speculative_config == {"num_draft_tokens": 3}
    inputs = prompt(repeat=True)
    expected, _ = run(model, inputs, max_new_tokens=12)
    extra = {key: value for key, value in asked.items() if key == "assistant_model"}
    with hf_specdec.record() as stats:
        output, _ = run(model, inputs, generation_config=loaded, **extra)
    assert output.tolist() == expected.tolist()
    assert stats.calls == 1
    assert stats.mode == mode
    assert 0 < stats.total.drafted <= 3 * stats.total.rounds


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_greedy_text_does_not_depend_on_the_lossless_rule(mode: str, name: str, acceptance: str) -> None:
    assert_same(
        target(mode, name),
        given(name, 2, padding=2, repeat=True),
        speculation(mode, name, acceptance=acceptance),
        max_new_tokens=20,
    )


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
@pytest.mark.filterwarnings("ignore:acceptance='typical' is lossy")
def test_other_rules_sample_without_breaking(mode: str, name: str, acceptance: str) -> None:
    asked = speculation(mode, name, acceptance=acceptance)
    inputs = given(name, 2, padding=2, repeat=True)
    first, _ = run(target(mode, name), inputs, max_new_tokens=20, do_sample=True, eos_token_id=None, **asked)
    second, _ = run(target(mode, name), inputs, max_new_tokens=20, do_sample=True, eos_token_id=None, **asked)
    assert first.shape == (2, 32)
    assert first.tolist() == second.tolist()


def test_the_generate_call_works_from_bos_alone(mode: str) -> None:
    assert_same(target(mode, "llama"), {}, speculation(mode, "llama"), max_new_tokens=10)


def test_drives_transformers_own_assisted_decoding(mode: str) -> None:
    """Every drafter is a `CandidateGenerator`: the loop of transformers takes it for its own."""
    model = target(mode, "llama")
    inputs = prompt(repeat=True)
    expected, _ = run(model, inputs, max_new_tokens=20)
    registered = get_mode(mode)
    draft = model_of("llama", num_hidden_layers=2)
    drafter = registered.build(Request(model, draft), registered.config())
    asked = []

    class Driven(type(model)):
        def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(True)
            return drafter

    driven = Driven(model.config).eval()
    driven.load_state_dict(model.state_dict(), strict=False)  # without heads, where there are some
    driven.generation_config = model.generation_config
    output, _ = run(driven, inputs, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert asked
    assert output.tolist() == expected.tolist()
