"""Models with recurrent states: saved before a draft is verified, put back after a rejection, and what was kept is read
again at the head of the next forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import LOOKUP, RECURRENT, assert_same, model_of, prompt, run
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_specdec
from hf_specdec.errors import UnsupportedCacheError, UnsupportedModelError
from hf_specdec.host.generate import CACHE_KEY
from hf_specdec.target import recurrent
from hf_specdec.target.cached_model import CachedModel
from hf_specdec.target.replay import Replay
from hf_specdec.target.selftest import support
from hf_specdec.testing import ScriptedDrafter, tiny_model

WIDTH = 5


@pytest.fixture(params=RECURRENT)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def plain_text(model: Any, tokens: int = 40) -> tuple[torch.Tensor, list[list[int]]]:
    """A prompt, and plain decoding's text after it."""
    inputs = prompt(1)
    output, _ = run(model, inputs, max_new_tokens=tokens, eos_token_id=None)
    return inputs, output.tolist()


def run_with(model: Any, inputs: Any, drafter: ScriptedDrafter, tokens: int = 40) -> tuple[Any, Any]:
    """The text and the statistics with this drafter, whose drafts are verified whole."""
    with hf_specdec.record() as stats:
        output, _ = run(
            model,
            inputs,
            max_new_tokens=tokens,
            eos_token_id=None,
            speculative_mode=drafter,
            speculative_config={"num_draft_tokens": WIDTH},
        )
    return output, stats


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every copy of a layer's states: saved or put back."""
    made: list[str] = []
    for what in ("save", "restore"):
        original = getattr(recurrent._SavedLinear, what)

        def counting(self: Any, what: str = what, original: Any = original) -> None:
            made.append(what)
            original(self)

        monkeypatch.setattr(recurrent._SavedLinear, what, counting)
    return made


# ---------------------------------------------------------------- exact counts


def test_a_drafter_that_is_always_right_replays_nothing(name: str, copies: list[str]) -> None:
    model = model_of(name)
    inputs, text = plain_text(model)
    support(model)  # the self-test's are not counted
    copies.clear()
    output, stats = run_with(model, inputs, ScriptedDrafter.knowing(text, WIDTH))
    assert output.tolist() == text
    assert stats.target_forwards == 1 + -(-39 // (WIDTH + 1))  # the prompt's brings the first token
    assert stats.replayed == 0
    assert "restore" not in copies


def test_a_drafter_that_is_always_wrong_costs_no_forward(name: str, copies: list[str]) -> None:
    model = model_of(name)
    inputs, text = plain_text(model)
    support(model)
    copies.clear()
    output, stats = run_with(model, inputs, ScriptedDrafter.lying(text, WIDTH, 97))
    assert output.tolist() == text
    assert stats.target_forwards == 40  # as many as plain decoding makes
    assert stats.replayed > 0
    layers = len(recurrent.SavedStates(filled(model)).layers)
    assert len(copies) <= 2 * layers * stats.rounds
    # states that were put back are not copied again before they have changed
    assert copies.count("save") < copies.count("restore")


def test_replayed_tokens_are_counted_per_round() -> None:
    """Of 5 drafted tokens the first two are right: three are kept, and read again by all rounds until one has none."""
    model = model_of("qwen3_next")
    inputs, text = plain_text(model)
    half = ScriptedDrafter(
        lambda row, tokens: [
            token if index < 2 else (token + 1) % 97
            for index, token in enumerate(text[row][len(tokens) : len(tokens) + WIDTH])
        ]
    )
    output, stats = run_with(model, inputs, half, tokens=13)
    assert output.tolist() == [text[0][: len(text[0]) - 27]]
    assert stats.rounds == 4
    assert stats.replayed == 0 + 3 + 6 + 9
    assert stats.summary()["replayed"] == 18
    assert stats.widths == {6: 1, 3 + 6: 1, 12: 2}  # the last drafts only the two tokens it has room for


def filled(model: Any) -> Any:
    """A cache that holds a few tokens."""
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 8]]), use_cache=True)[CACHE_KEY]


def test_one_more_state_per_layer() -> None:
    cache = filled(model_of("qwen3_next"))
    states = recurrent.SavedStates(cache)
    states.save()
    copies = [id(copy) for layer in states.layers for copy in layer.copies.values()]
    states.has_changed()
    states.save()
    states.restore()
    assert copies == [id(copy) for layer in states.layers for copy in layer.copies.values()]
    assert len(copies) == 3 * 2  # a convolution and a recurrent state in each of three layers


# ---------------------------------------------------------------- any sequence of accepts and rejects


Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("verify"), st.integers(1, 6), st.integers(1, 6)),
        st.tuples(st.just("draft"), st.integers(1, 4), st.integers(0, 4)),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(steps=STEPS, rows=st.integers(1, 2), seed=st.integers(0, 10))
@torch.no_grad()
def test_any_sequence_of_accepts_and_rejects(steps: list[Step], rows: int, seed: int) -> None:
    """Equals the same model without a cache: blocks verified in part, tokens drafted and taken back."""
    model = model_of("qwen3_next")
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[list[int]]:
        return torch.randint(3, 97, (rows, count), generator=generator).tolist()

    texts = words(4)
    target, _ = CachedModel.filled(model, support(model), texts)
    for kind, size, kept in steps:
        if kind == "verify":
            block = words(size)
            kept = min(kept, size)
            logits = target.forward(block, [list(range(-1, size - 1))] * rows).logits
            target.commit([list(range(kept))] * rows)
            texts = [text + new for text, new in zip(texts, block, strict=True)]
            expected = model(torch.tensor(texts), use_cache=False).logits[:, -size:]
            texts = [text[: len(text) - size + kept] for text in texts]
        else:
            drafted = words(size)
            for column in zip(*drafted, strict=True):
                target.extend(column)
            wrong = min(kept, size)
            target.take_back([wrong] * rows)
            texts = [text + new[: size - wrong] for text, new in zip(texts, drafted, strict=True)]
            more = words(1)
            logits = target.append(more)[:, None]
            texts = [text + new for text, new in zip(texts, more, strict=True)]
            expected = model(torch.tensor(texts), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)
        assert target.root_positions == [len(text) for text in texts]
        assert target.past_slots == len(texts[0])


def test_bookkeeping_of_what_is_read_again() -> None:
    replay = Replay(2)
    assert replay.block([[1, 2], [3]]) == [[1, 2], [3, 3]]
    replay.extend([[1, 2], [3, 3]])
    assert replay.take_back(1) == 2
    assert replay.pending == [[1], [3]]
    assert len(replay) == 1
    block = replay.block([[5], [6]])
    assert block == [[1, 5], [3, 6]]
    replay.extend(block)
    assert len(replay) == 0
    replay.extend([[7], [8]])
    assert replay.take_back(2) == 3
    assert replay.pending == [[1], [3]]
    replay.select_rows([1])
    assert replay.pending == [[3]]


# ---------------------------------------------------------------- caches, continued and returned


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_returned_cache_holds_what_plain_decoding_leaves(name: str, cache: str | None) -> None:
    model = model_of(name)
    inputs, text = plain_text(model)
    # (in the last round before a limit nothing is drafted, so that nothing is pending; before an EOS something is)
    kwargs = {"return_dict_in_generate": True, "max_new_tokens": 40, "eos_token_id": text[0][12 + 9]}
    kwargs["cache_implementation"] = cache
    plain, _ = run(model, inputs, **kwargs)
    wrong = ScriptedDrafter.lying(text, 3, 97)
    ours, _ = run(model, inputs, **kwargs, speculative_mode=wrong, speculative_config={"num_draft_tokens": 3})
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.speculation.catch_up_forwards == 1
    for mine, theirs in zip(ours[CACHE_KEY].layers, plain[CACHE_KEY].layers, strict=True):
        for field in ("conv_states", "recurrent_states"):
            for index, state in getattr(theirs, field, {}).items():
                if state is not None:
                    size = max(1.0, float(state.abs().max()))
                    torch.testing.assert_close(getattr(mine, field)[index], state, rtol=1e-3, atol=1e-3 * size)
        assert getattr(mine, "record_past", False) is False
    assert int(ours[CACHE_KEY].get_seq_length()) == int(plain[CACHE_KEY].get_seq_length())


def test_a_prompt_continued_from_a_cache(name: str) -> None:
    """The first call drafts wrong tokens up to its end; the second goes on from its cache."""
    model = model_of(name)
    texts = []
    for speculation in ({}, {**LOOKUP, "speculative_config": {"num_draft_tokens": 4}}):
        inputs, kwargs = prompt(2, padding=3, repeat=True), {"return_dict_in_generate": True, "eos_token_id": None}
        first, _ = run(model, inputs, max_new_tokens=9, **kwargs, **speculation)
        more = torch.tensor([[11, 12], [13, 14]])
        ids = torch.cat([first.sequences, more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 12, dtype=torch.long)], dim=1)
        second, _ = run(
            model,
            {"input_ids": ids, "attention_mask": mask},
            max_new_tokens=9,
            **kwargs,
            **{CACHE_KEY: first[CACHE_KEY]},
            **speculation,
        )
        texts.append(second.sequences.tolist())
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- as a draft model


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("target", ["llama", "qwen3_next"])
def test_a_draft_model_with_recurrent_states(target: str, batch: int) -> None:
    """Rows of a batch go in lockstep then."""
    speculation = {
        "speculative_mode": "assistant",
        "assistant_model": model_of("olmo_hybrid"),
        "speculative_config": {"num_draft_tokens": 4},
    }
    for sampling in ({}, {"do_sample": True}):
        assert_same(model_of(target), prompt(batch, padding=3), speculation, max_new_tokens=20, **sampling)


def test_a_draft_model_that_agrees_is_kept_aligned() -> None:
    """The target drafts for itself: every draft is right, in a batch with prompts of different lengths."""
    model = model_of("falcon_h1")
    with hf_specdec.record() as stats:
        assert_same(
            model,
            prompt(2, padding=3),
            {
                "speculative_mode": "assistant",
                "assistant_model": tiny_model("falcon_h1"),
                "speculative_config": {"num_draft_tokens": 4},
            },
            max_new_tokens=21,
            eos_token_id=None,
        )
    assert stats.acceptance_rate == 1.0
    assert stats.rounds == 4


# ---------------------------------------------------------------- what is refused


class _InPlace:
    """Stands for a cache layer of a model's own that changes a tensor in place."""

    def __init__(self) -> None:
        self.states = {"all": torch.zeros(2)}
        self.count = 0


def test_states_by_reference_are_put_back() -> None:
    layer = _InPlace()
    saved = recurrent._SavedReferences(layer)
    saved.save()
    before = layer.states["all"]
    layer.states["all"], layer.count = before + 1, 5
    saved.restore()
    assert layer.states["all"] is before
    assert layer.count == 0


def test_states_that_change_in_place_are_not_taken_for_references() -> None:
    layer = _InPlace()
    saved = recurrent._SavedReferences(layer)
    saved.save()
    layer.states["all"] += 1
    with pytest.raises(UnsupportedCacheError, match="_InPlace changes its states in place"):
        saved.restore()


def test_models_whose_blocks_ignore_the_state_are_refused() -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="does not go on from it as single steps do"):
        run(model, prompt(1), max_new_tokens=4, **LOOKUP)
    with pytest.warns(UserWarning, match="Decoding plainly"):
        ours, _ = run(model, prompt(1), max_new_tokens=4, **LOOKUP, speculative_config={"on_unsupported": "plain"})
    assert ours.tolist() == run(model, prompt(1), max_new_tokens=4)[0].tolist()


def test_transformers_own_assisted_generation_refuses_them(name: str) -> None:
    """So this is the first way to speed them up in transformers."""
    model = model_of(name)
    with pytest.raises(ValueError, match=r"stateful|recurrent|crop"):
        run(model, prompt(1), max_new_tokens=8, prompt_lookup_num_tokens=3)
