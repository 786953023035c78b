"""Measuring: the arithmetic without a model, and whole runs on a tiny random one."""

from __future__ import annotations

import json

import pytest
import torch
from test_report import summary_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec.errors import (
    ConfigurationError,
    InvalidSettingError,
    UnknownModeError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from hf_specdec.generation import NO_MODE
from hf_specdec.measure import bench, loading
from hf_specdec.measure.prompts import read_prompts
from hf_specdec.measure.report import PLAIN, Batch, Case, Environment, Prompt, Settings
from hf_specdec.modes import get_mode, mode_names
from hf_specdec.testing import tiny_model

ENVIRONMENT = Environment("tiny", None, "float32", "cpu", 1, "2", "5", "0")
WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", *(f"w{number}" for number in range(92))]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} <user> {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A word a token, for `tiny_model`."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        padding_side="left",
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


PROMPTS_OF_TWO_TASKS = [
    Prompt("w1 w2 w3 w1 w2 w3 w1 w2", "copy"),
    Prompt("w5 w6", "copy"),
    Prompt("w9 w9 w9 w9 w9", "copy"),
    Prompt("w30 w31 w32 w33", "write"),
]


# ---------------------------------------------------------------- prompts and cases


def test_read_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one"},
        {"turns": ["two", "and then?"], "task": "qa", "question_id": 7},
        {"prompt": "three", "turns": ["not this"], "task": "qa"},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    expected = [Prompt("one", "prompts"), Prompt("two", "qa"), Prompt("three", "qa")]
    assert read_prompts(file) == expected
    assert read_prompts(file, per_task=1) == expected[:2]


@pytest.mark.parametrize("line", ["nonsense", "[]", "7", '{"text": "a"}', '{"turns": []}', '{"prompt": ""}'])
def test_read_prompts_names_the_wrong_line(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"prompts\.jsonl:2: expected"):
        read_prompts(file)


def test_read_prompts_without_prompts(tmp_path):
    with pytest.raises(ConfigurationError, match="Cannot read"):
        read_prompts(tmp_path / "missing.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigurationError, match="holds no prompts"):
        read_prompts(empty)


def test_batches_do_not_mix_tasks():
    prompts = [Prompt("1", "a"), Prompt("2", "b"), Prompt("3", "a"), Prompt("4", "a")]
    assert bench.make_batches(prompts, 2) == [
        Batch("a", (prompts[0], prompts[2])),
        Batch("a", (prompts[3],)),
        Batch("b", (prompts[1],)),
    ]


def test_cases_of_every_mode_that_can_run():
    cases, skipped = bench.make_cases(Settings(), transformers_own=True)
    needy = [name for name in mode_names() if get_mode(name).needs_assistant]
    assert [case.name for case in cases] == [
        PLAIN,
        *(name for name in mode_names() if name not in needy),
        "transformers lookup",
    ]
    assert [case.case for case in skipped] == needy
    assert "--assistant" in skipped[0].reason


def test_cases_with_an_assistant():
    assistant = object()
    cases, skipped = bench.make_cases(Settings(), assistant=assistant, transformers_own=True)
    assert not skipped
    takes = {case.name for case in cases if case.arguments.get("assistant_model") is assistant}
    assert takes == {name for name in mode_names() if get_mode(name).needs_assistant} | {"transformers assisted"}


def test_settings_reach_the_cases():
    cases, _ = bench.make_cases(Settings(temperature=0.5, num_draft_tokens=3), ["prompt_lookup"], transformers_own=True)
    plain, mode, own = cases
    assert mode.arguments["speculative_config"] == {"num_draft_tokens": 3}
    assert plain.promises_plain
    assert mode.promises_plain
    assert not own.promises_plain


def test_modes_asked_for_by_name_are_not_skipped():
    with pytest.raises(UnknownModeError, match="prompt_lookup"):
        bench.make_cases(Settings(), ["no_such_mode"])
    with pytest.raises(ConfigurationError, match="needs a draft model"):
        bench.make_cases(Settings(), ["assistant"])
    cases, _ = bench.make_cases(Settings(), ["prompt_lookup", "prompt_lookup"])
    assert [case.name for case in cases] == [PLAIN, "prompt_lookup"]


# ---------------------------------------------------------------- models


def test_missing_model(tmp_path):
    with pytest.raises(ConfigurationError, match="Cannot load the model"):
        loading.load_model(str(tmp_path))
    with pytest.raises(ConfigurationError, match="Cannot load the tokenizer"):
        loading.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "mixtral", "phi3"])
def test_first_layers_are_the_models_own(name):
    model = tiny_model(name)
    draft = loading.first_layers(model, 2)
    ids = torch.tensor([[1, 5, 9, 30, 31, 40, 41, 42, 43, 44, 45]])
    inner = model.model
    whole = inner.layers
    with torch.no_grad():
        got = draft(ids).logits
        inner.layers = whole[:2]  # the same layers, left out of the whole model by hand
        model.config.num_hidden_layers = 2
        expected = model(ids).logits
    inner.layers, model.config.num_hidden_layers = whole, 3
    assert torch.equal(got, expected)
    assert draft.config.num_hidden_layers == 2
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} <= own
    assert len(model.model.layers) == 3


def test_first_layers_out_of_range(model):
    for layers in (0, 3):
        with pytest.raises(InvalidSettingError, match="between 1 and 2"):
            loading.first_layers(model, layers)
    with pytest.raises(UnsupportedModelError, match="not built like Llama"):
        loading.first_layers(tiny_model("gpt2"), 1)


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}])
def test_a_run_is_identical_and_complete(model, tokenizer, batch_size, sampling):
    settings = Settings(max_new_tokens=12, batch_size=batch_size, repeats=2, **sampling)
    cases, skipped = bench.make_cases(settings, assistant=loading.first_layers(model, 1))
    told = []
    report = bench.measure(
        model,
        tokenizer,
        PROMPTS_OF_TWO_TASKS,
        cases,
        settings,
        skipped=skipped,
        progress=lambda done, total, label: told.append((done, total)),
    )
    assert report.broken_promises == []
    assert all(summary.identical for summary in report.summaries)
    names = [case.name for case in report.cases]
    assert {"plain", "assistant", "prompt_lookup"} <= set(names)
    batches = 4 if batch_size == 1 else 3
    assert len(report.measurements) == len(names) * batches * 2
    assert [done for done, _ in told] == list(range(len(told)))
    assert told[-1][0] == told[-1][1]
    for summary in report.summaries:
        plain = summary_of(report.summaries, PLAIN, summary.task)
        assert summary.tokens == plain.tokens
        assert summary.rows == {"copy": 3, "write": 1, "overall": 4}[summary.task]
        assert summary.mean_acceptance_length >= 1.0
    assert report.environment.dtype == "float32"


def test_the_numbers_of_a_run_are_those_of_generate(model, tokenizer):
    settings = Settings(max_new_tokens=30, repeats=1, num_draft_tokens=4)
    prompts = [Prompt("w1 w2 w3 w1 w2 w3 w1 w2")]
    report = bench.measure(model, tokenizer, prompts, bench.make_cases(settings, ["prompt_lookup"])[0], settings)
    ids = torch.tensor([[1, 3, *(WORDS.index(word) for word in prompts[0].text.split()), 4]])
    output = model.generate(
        ids,
        max_new_tokens=30,
        do_sample=False,
        speculative_mode="prompt_lookup",
        speculative_config={"num_draft_tokens": 4},
        return_dict_in_generate=True,
    )
    summary = summary_of(report.summaries, "prompt_lookup", "prompts")
    assert summary.tokens == output.speculation.tokens == output.sequences.shape[1] - ids.shape[1]
    assert summary.mean_acceptance_length == output.speculation.mean_acceptance_length


def test_prompts_without_a_chat_template(model):
    settings = Settings(max_new_tokens=5, repeats=1)
    cases, _ = bench.make_cases(settings, ["prompt_lookup"])
    report = bench.measure(model, make_tokenizer(None), [Prompt("w1 w2")], cases, settings)
    assert report.broken_promises == []


def test_cases_take_turns_and_the_order_rotates(model, tokenizer, monkeypatch):
    order = []
    run = bench._Runner.run

    def spy(self, case, inputs):
        order.append(case.name)
        return run(self, case, inputs)

    monkeypatch.setattr(bench._Runner, "run", spy)
    settings = Settings(max_new_tokens=3, repeats=2)
    cases = [Case(name, {"speculative_mode": NO_MODE}) for name in (PLAIN, "b", "c")]
    bench.measure(model, tokenizer, [Prompt("w1"), Prompt("w2")], cases, settings)
    assert order == [PLAIN, "b", "c", *(PLAIN, "b", "c"), *("b", "c", PLAIN), *("b", "c", PLAIN), *("c", PLAIN, "b")]


def test_a_case_that_cannot_run_is_skipped_with_its_reason(model, tokenizer):
    settings = Settings(max_new_tokens=4, repeats=1, batch_size=2)
    beams = {"speculative_mode": "prompt_lookup", "num_beams": 2}
    cases, _ = bench.make_cases(settings, ["prompt_lookup"], transformers_own=True)
    cases.append(Case("beams", beams, refusals=(UnsupportedGenerationError,)))
    report = bench.measure(model, tokenizer, PROMPTS_OF_TWO_TASKS, cases, settings)
    assert [case.name for case in report.cases] == [PLAIN, "prompt_lookup"]
    # transformers' own lookup cannot do batches
    assert [skipped.case for skipped in report.skipped] == ["transformers lookup", "beams"]
    assert "batch" in report.skipped[0].reason
    assert "num_beams" in report.skipped[1].reason
    with pytest.raises(UnsupportedGenerationError):
        bench.measure(model, tokenizer, PROMPTS_OF_TWO_TASKS, [cases[0], Case("beams", beams)], settings)


def test_a_different_output_is_seen(model, tokenizer):
    settings = Settings(max_new_tokens=12, repeats=2)
    penalised = {"speculative_mode": NO_MODE, "repetition_penalty": 5.0}
    cases = [Case(PLAIN, {"speculative_mode": NO_MODE}), Case("broken", penalised)]
    report = bench.measure(model, tokenizer, [Prompt("w9 w9 w9 w9"), Prompt("w5 w6 w7 w5 w6")], cases, settings)
    assert report.broken_promises == ["broken"]
    assert summary_of(report.summaries, "broken", "prompts").differing_rows > 0
    assert summary_of(report.summaries, PLAIN, "prompts").identical


def test_nothing_to_compare(model, tokenizer):
    with pytest.raises(ConfigurationError, match="plain"):
        bench.measure(model, tokenizer, [Prompt("w1")], [Case("b", {})], Settings())
    with pytest.raises(ConfigurationError, match="no prompts"):
        bench.measure(model, tokenizer, [], [Case(PLAIN, {})], Settings())
