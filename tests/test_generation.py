"""The way in: install, uninstall, where the mode may come from, pipelines, threads."""

from __future__ import annotations

import pickle
import subprocess
import sys
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import letter_tokenizer, model_of, prompt, run
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, TextIteratorStreamer, pipeline

import hf_specdec
from hf_specdec.testing import ScriptedDrafter, tiny_model


def test_install_is_idempotent_and_undone() -> None:
    wrapped = GenerationMixin.generate
    original = wrapped.__wrapped__
    hf_specdec.install()
    assert GenerationMixin.generate is wrapped
    try:
        hf_specdec.uninstall()
        assert GenerationMixin.generate is original
        hf_specdec.uninstall()
        with pytest.raises(ValueError, match="speculative_mode"):
            run(model_of("llama"), prompt(), max_new_tokens=3, speculative_mode="prompt_lookup")
    finally:
        hf_specdec.install()
    assert GenerationMixin.generate.__wrapped__ is original


def test_without_a_mode_the_original_gets_the_arguments_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec import generation

    got = {}

    def original(self: Any, *args: Any, **kwargs: Any) -> str:
        got.update(args=args, kwargs=kwargs)
        return "plain"

    ids = torch.ones(1, 2)
    answer = generation.generate(original, model_of("llama"), (ids,), {"max_new_tokens": 3})
    assert answer == "plain"
    assert got["args"][0] is ids
    assert got["kwargs"] == {"max_new_tokens": 3}


def test_the_signature_is_that_of_the_host() -> None:
    import inspect

    assert "logits_processor" in inspect.signature(GenerationMixin.generate).parameters
    assert GenerationMixin.generate.__doc__ == GenerationMixin.generate.__wrapped__.__doc__


def test_the_mixin_works_without_the_wrapper() -> None:
    class Fast(hf_specdec.SpeculativeGenerationMixin, LlamaForCausalLM):
        pass

    model = model_of("llama")
    fast = Fast(model.config).eval()
    fast.load_state_dict(model.state_dict())
    fast.generation_config = model.generation_config
    expected, _ = run(model, prompt(repeat=True), max_new_tokens=12)
    for installed in (True, False):
        if not installed:
            hf_specdec.uninstall()
        try:
            with hf_specdec.record() as stats:
                output, _ = run(fast, prompt(repeat=True), max_new_tokens=12, speculative_mode="prompt_lookup")
            assert output.tolist() == expected.tolist()
            assert stats.calls == 1
        finally:
            hf_specdec.install()


def test_positional_arguments() -> None:
    model, inputs = model_of("llama"), prompt(repeat=True)
    expected, _ = run(model, inputs, max_new_tokens=9)
    settings = GenerationConfig(max_new_tokens=9, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    with hf_specdec.record() as stats:
        output = model.generate(inputs["input_ids"], settings, speculative_mode="prompt_lookup")
    assert output.tolist() == expected.tolist()
    assert stats.calls == 1


def test_where_the_mode_comes_from_and_what_wins() -> None:
    model, inputs = tiny_model("llama"), prompt(repeat=True)
    expected, _ = run(model, inputs, max_new_tokens=9)

    def mode_used(**kwargs: Any) -> tuple[str, int]:
        length = {} if "generation_config" in kwargs else {"max_new_tokens": 9}
        with hf_specdec.record() as stats:
            output, _ = run(model, inputs, **length, **kwargs)
        assert output.tolist() == expected.tolist()
        return stats.mode, max(stats.widths, default=0)

    assert mode_used() == ("", 0)
    hf_specdec.configure(model, "prompt_lookup", {"num_draft_tokens": 2})
    assert mode_used() == ("prompt_lookup", 3)
    assert mode_used(speculative_mode="none") == ("", 0)
    assert mode_used(speculative_config={"num_draft_tokens": 1}) == ("prompt_lookup", 2)
    drafter = ScriptedDrafter(lambda row, text: [1, 1, 1, 1])
    settings = {"num_draft_tokens": 4}
    assert mode_used(speculative_mode=drafter, speculative_config=settings) == ("ScriptedDrafter", 5)
    given = GenerationConfig(max_new_tokens=9, pad_token_id=0, eos_token_id=2)
    hf_specdec.configure(given, "prompt_lookup", {"num_draft_tokens": 3})
    assert mode_used(generation_config=given) == ("prompt_lookup", 4)
    hf_specdec.configure(model, None)
    assert mode_used() == ("", 0)
    assert not [name for name in vars(model.generation_config) if name.startswith("speculative_")]


def test_settings_survive_saving_the_model(tmp_path: Any) -> None:
    model = tiny_model("llama")
    model.generation_config._from_model_config = True  # as a fresh model's is
    hf_specdec.configure(model, "prompt_lookup", hf_specdec.PromptLookupConfig(num_draft_tokens=2, max_match_length=4))
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.speculative_mode == "prompt_lookup"
    assert loaded.generation_config.speculative_config == {"num_draft_tokens": 2, "max_match_length": 4}
    with hf_specdec.record() as stats:
        run(loaded, prompt(repeat=True), max_new_tokens=6)
    assert stats.calls == 1


def test_configure_checks_before_it_changes() -> None:
    model = tiny_model("llama")
    before = model.generation_config
    with pytest.raises(hf_specdec.errors.UnknownModeError):
        hf_specdec.configure(model, "nonsense")
    with pytest.raises(hf_specdec.errors.InvalidSettingError):
        hf_specdec.configure(model, "prompt_lookup", {"nonsense": 1})
    assert model.generation_config is before


def test_a_model_still_pickles() -> None:
    model = tiny_model("llama")
    expected, _ = run(model, prompt(), max_new_tokens=5, speculative_mode="prompt_lookup")
    again = pickle.loads(pickle.dumps(model))
    output, _ = run(again, prompt(), max_new_tokens=5, speculative_mode="prompt_lookup")
    assert output.tolist() == expected.tolist()


def texts_through_a_pipeline(*, at_construction: dict[str, Any], per_call: dict[str, Any], inputs: Any) -> Any:
    model, tokenizer = tiny_model("llama"), letter_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **at_construction)
    return pipe(inputs, max_new_tokens=12, do_sample=False, **per_call)


PIPELINE_INPUTS = {
    "plain": "abcabcabc",
    "chat": [{"role": "user", "content": "abcabc"}],
    "list": ["abcabcabc", "hello-hello-hel", "xy"],
}


@pytest.mark.parametrize("kind", PIPELINE_INPUTS)
@pytest.mark.parametrize("where", ["call", "construction"])
@pytest.mark.filterwarnings("ignore:You seem to be using the pipelines sequentially")
def test_pipelines(kind: str, where: str) -> None:
    extra = {"batch_size": 2} if kind == "list" else {}
    asked = {"speculative_mode": "prompt_lookup", "speculative_config": {"num_draft_tokens": 3}}
    inputs = PIPELINE_INPUTS[kind]
    expected = texts_through_a_pipeline(at_construction=extra, per_call={}, inputs=inputs)
    with hf_specdec.record() as stats:
        texts = texts_through_a_pipeline(
            at_construction={**extra, **(asked if where == "construction" else {})},
            per_call=asked if where == "call" else {},
            inputs=inputs,
        )
    assert texts == expected
    assert stats.calls == (2 if kind == "list" else 1)


def test_iterator_streamer_read_from_another_thread() -> None:
    model, tokenizer = model_of("llama"), letter_tokenizer()
    inputs = dict(tokenizer("abcabcabc", return_tensors="pt", add_special_tokens=False, return_token_type_ids=False))
    expected, _ = run(model, inputs, max_new_tokens=20)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {**inputs, "max_new_tokens": 20, "streamer": streamer, "speculative_mode": "prompt_lookup"}
    with hf_specdec.record() as stats:
        thread = Thread(target=model.generate, kwargs=arguments)
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text == tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])
    assert stats.calls == 1, "record() must see calls of other threads"


def test_import_is_enough_and_quick_to_undo() -> None:
    code = (
        "import transformers; before = transformers.GenerationMixin.generate\n"
        "import hf_specdec; assert transformers.GenerationMixin.generate is not before\n"
        "hf_specdec.uninstall(); assert transformers.GenerationMixin.generate is before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names() -> None:
    assert len(hf_specdec.__all__) == len(set(hf_specdec.__all__))
    for name in hf_specdec.__all__:
        assert hasattr(hf_specdec, name)


def test_uninstalling_leaves_what_others_put_over_it() -> None:
    import functools

    model, calls = model_of("llama"), []
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs  # type: ignore[method-assign]
    try:
        run(model, prompt(), max_new_tokens=2, speculative_mode="prompt_lookup")
        hf_specdec.uninstall()
        assert GenerationMixin.generate is theirs
        run(model, prompt(), max_new_tokens=2)
        with pytest.raises(ValueError, match="speculative_mode"):
            run(model, prompt(), max_new_tokens=2, speculative_mode="prompt_lookup")
        hf_specdec.install()
        assert GenerationMixin.generate is theirs
        run(model, prompt(), max_new_tokens=2, speculative_mode="prompt_lookup")
        assert len(calls) == 4
    finally:
        GenerationMixin.generate = ours  # type: ignore[method-assign]
        hf_specdec.install()
