"""Drafters and calls that fail or meddle: no trace is left, and the output stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, assert_unchanged, model_of, prompt, run, snapshot, texts_of
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.errors import DraftError
from hf_specdec.host.generate import CACHE_KEY
from hf_specdec.testing import ScriptedDrafter


class Interrupting(StoppingCriteria):
    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.after, self.error = after, error

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.after:
            raise self.error("stop it")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["prompt_lookup", "assistant"])
def test_an_exception_leaves_no_trace(mode: str, error: type[BaseException]) -> None:
    model, draft = model_of("gemma3"), model_of("gemma3", num_hidden_layers=2)
    asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 3}}
    if mode == "assistant":
        asked["assistant_model"] = draft
    before, draft_before = snapshot(model), snapshot(draft)
    for do_sample in (False, True):
        states = []
        for arguments in ({}, asked):
            with pytest.raises(error, match="stop it"):
                run(
                    model,
                    prompt(repeat=True),
                    max_new_tokens=20,
                    do_sample=do_sample,
                    eos_token_id=None,
                    stopping_criteria=StoppingCriteriaList([Interrupting(18, error)]),
                    **arguments,
                )
            states.append(torch.get_rng_state())
        assert torch.equal(states[0], states[1]), "the generator must be where plain decoding leaves it"
    assert_unchanged(model, before)
    assert_unchanged(draft, draft_before)
    assert_same(model, prompt(repeat=True), asked, max_new_tokens=12)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("cache", ["growing", "static"])
def test_the_users_cache_after_an_exception(name: str, cache: str) -> None:
    """It holds no drafted token: a call that goes on from it says what plain decoding would."""
    model = model_of(name, **({"sliding_window": 64} if name == "gemma3" else {}))
    inputs = prompt(1)
    text = texts_of(model, inputs, max_new_tokens=30, eos_token_id=None)[0]
    config = model.config
    made = {
        "growing": lambda: transformers.DynamicCache(config=config),
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=64),
    }
    texts, slots = [], []
    lying = [
        {"speculative_mode": ScriptedDrafter.lying([text], 4, 97), "speculative_config": {"num_draft_tokens": size}}
        for size in (0, 1, 4)
    ]
    for asked in ({}, *lying):
        own = made[cache]()
        with pytest.raises(RuntimeError, match="stop it"):
            run(
                model,
                inputs,
                max_new_tokens=20,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([Interrupting(18, RuntimeError)]),
                **{CACHE_KEY: own},
                **asked,
            )
        slots.append(int(own.get_seq_length()))
        ids = torch.tensor([text[:20]])
        more, _ = run(model, {"input_ids": ids}, max_new_tokens=8, eos_token_id=None, **{CACHE_KEY: own})
        texts.append(more.tolist())
    assert texts == [[text[:28]]] * 4
    assert slots[1] == slots[0]
    assert max(slots) == slots[0]


def test_a_failing_drafter_does_no_harm() -> None:
    def fail(row: int, text: list[int]) -> list[int]:
        raise RuntimeError("no idea")

    model = model_of("llama")
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="no idea"):
        run(model, prompt(), max_new_tokens=8, speculative_mode=ScriptedDrafter(fail))
    assert_unchanged(model, before)


def test_a_malformed_draft_is_named() -> None:
    class WrongRoot(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Any:
            return hf_specdec.Draft.chains([0] * context.batch_size, [[5]] * context.batch_size)

    class WrongRows(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Any:
            return hf_specdec.Draft.chains(context.roots * 2, [[5]] * 2 * context.batch_size)

    class OutOfVocabulary(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Any:
            return hf_specdec.Draft.chains(context.roots, [[97]] * context.batch_size)

    for kind, message in ((WrongRoot, "last committed"), (WrongRows, "2 rows"), (OutOfVocabulary, "vocabulary")):
        with pytest.raises(DraftError, match=message):
            run(model_of("llama"), prompt(), max_new_tokens=8, speculative_mode=kind(lambda row, text: []))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, "must return a Draft, got NoneType"),
        ({"tokens": [[0, 5.0]]}, "whole numbers"),
        ({"tokens": [[0, True]]}, "whole numbers"),
        ({"tokens": [[0, "5"]]}, "whole numbers"),
        ({"parents": [[-1, 0.0]]}, "whole numbers"),
        ({"confidence": [[1.0, float("nan")]]}, "between 0 and 1"),
        ({"confidence": [[1.0, None]]}, "between 0 and 1"),
        ({"confidence": [[1.0, -0.5]]}, "between 0 and 1"),
        ({"q": torch.ones(1, 1, 97)}, r"q of the draft must be a tensor \[1, 2, V\]"),
        ({"q": torch.ones(2, 97)}, r"q of the draft must be a tensor"),
        ({"q": [[0.5] * 97] * 2}, r"q of the draft must be a tensor"),
        ({"q": torch.ones(1, 2, 4)}, "does not know"),
        ({"q": torch.full((1, 2, 97), float("nan"))}, "not finite"),
    ],
)
@pytest.mark.parametrize("size", ["auto", 2])
def test_a_draft_of_the_wrong_types_is_named(fields: dict[str, Any] | None, message: str, size: Any) -> None:
    class Malformed(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Any:
            if fields is None:
                return None
            draft = {"tokens": [[0, 5]], "parents": [[-1, 0]], **fields}
            draft["tokens"] = [[context.roots[0], *draft["tokens"][0][1:]]]
            return hf_specdec.Draft(**draft)

    with pytest.raises(DraftError, match=message):
        run(
            model_of("llama"),
            prompt(),
            max_new_tokens=8,
            speculative_mode=Malformed(lambda row, text: []),
            speculative_config={"num_draft_tokens": size},
        )


class Meddling(ScriptedDrafter):
    """Writes into everything it is given, and draws from the global generator."""

    def start(self, context: Any) -> None:
        context.padded_prompts.fill_(7)
        torch.rand(3)

    def propose(self, context: Any, budget: Any) -> Any:
        draft = super().propose(context, budget)
        torch.randint(0, 5, (4,))
        for row in context.tokens:
            row.append(5)
        context.finished[:] = [True] * len(context.finished)
        if context.tape is not None:
            context.tape.noise(context.step(0) + 2)
        torch.rand(2)
        return draft

    def attach(self, target: Any, prompt: Any) -> None:
        prompt.logits.neg_()

    def observe(self, context: Any, draft: Any, scores: Any, verdict: Any) -> None:
        context.tokens[0].append(9)
        scores.logits.fill_(0.0)
        torch.rand(1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_meddling_drafter_does_no_harm(batch: int, do_sample: bool) -> None:
    model, inputs = model_of("llama"), prompt(batch, padding=2)
    texts = texts_of(model, inputs, max_new_tokens=20, do_sample=do_sample)
    drafter = Meddling(lambda row, text: texts[row][len(text) : len(text) + 2])
    assert_same(
        model,
        inputs,
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 2}},
        max_new_tokens=20,
        do_sample=do_sample,
    )
