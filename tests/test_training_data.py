"""Training data: prompts in the usual formats, and answers that are what the model says, kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import letter_tokenizer, prompt, run

from hf_specdec.errors import TrainingDataError
from hf_specdec.testing import tiny_model
from hf_specdec.training import DataSettings, read_chats
from hf_specdec.training.answers import AnswerCache, weights_digest
from hf_specdec.training.data import answer
from hf_specdec.training.prompts import encode

PROMPTS = ["hello there", "what now", "a longer prompt than these", "one", "two", "three", "ja", "nein", "abc", "xyz"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "hi"}, [("user", "hi")]),
        ({"text": "hi", "label": 3}, [("user", "hi")]),
        ({"turns": ["first", "second"]}, [("user", "first")]),
        ({"question": "why?", "answer": "because"}, [("user", "why?")]),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2")]),
        ({"instruction": "Add.", "input": ""}, [("user", "Add.")]),
        (
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "U"},
                    {"role": "assistant", "content": "A"},
                ]
            },
            [("system", "S"), ("user", "U")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "U"},
                    {"from": "gpt", "value": "A"},
                    {"from": "human", "value": "V"},
                ]
            },
            [("user", "U"), ("assistant", "A"), ("user", "V")],
        ),
    ],
)
def test_prompts_in_the_usual_formats(tmp_path: Path, row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row) + "\n\n")
    (chat,) = read_chats(file)
    assert [(message["role"], message["content"]) for message in chat] == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json\n",
        '{"other": 1}\n',
        '{"prompt": 3}\n',
        '{"turns": "x"}\n' * 0 + '{"messages": [{"role": "user"}]}\n',
        "[1]\n",
        '{"messages": [{"role": "assistant", "content": "A"}]}\n',
        '{"messages": [{"role": "user", "content": null}]}\n',
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
    ],
)
def test_prompts_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(TrainingDataError, match=r"data\.jsonl"):
        read_chats(file)


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="`datasets` is an extra")
    datasets.Dataset.from_list([{"prompt": text} for text in PROMPTS]).save_to_disk(tmp_path / "set")
    assert [chat[0]["content"] for chat in read_chats(tmp_path / "set")] == PROMPTS
    with pytest.raises(TrainingDataError, match="cannot be read as a data set"):
        read_chats(tmp_path)


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("do_sample", [False, True])
def test_answers_are_what_generate_says_and_hidden_states_what_the_model_computes(do_sample: bool) -> None:
    model, inputs = tiny_model("llama"), prompt(3, padding=3)
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    settings = DataSettings(max_new_tokens=14, temperature=1.2)
    sampling = {"do_sample": True, "temperature": 1.2} if do_sample else {"do_sample": False}
    plain, _ = run(model, inputs, seed=5, max_new_tokens=14, eos_token_id=2, **sampling)
    model.generation_config.eos_token_id = 2
    answers = answer(model, prompts, settings, do_sample, seed=5)
    for row, (one, text) in enumerate(zip(answers, prompts, strict=True)):
        said = plain[row, 12:].tolist()
        said = said[: said.index(2) + 1] if 2 in said else said
        assert one.tokens.tolist() == said
        with torch.no_grad():
            output = model.model(torch.tensor([text + said[:-1]])).last_hidden_state[0, len(text) - 1 :]
            probabilities = model.lm_head(output).softmax(-1)
        torch.testing.assert_close(one.hidden.float(), output, rtol=0.02, atol=0.02)  # kept as bfloat16
        best = probabilities.topk(8)
        torch.testing.assert_close(one.label_probabilities.float(), best.values, rtol=2e-3, atol=1e-3)
        assert (one.label_tokens == best.indices).float().mean() > 0.99


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 8.0},
        {"top_k": 1},
        {"bad_words_ids": [[token] for token in range(3, 60)]},
        {"num_beams": 3},
        {"return_dict_in_generate": True},
        {"speculative_mode": "prompt_lookup", "max_length": 9},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_models_own_ways_of_generating_stay_out_of_its_answers(own: dict[str, Any]) -> None:
    prompts, settings = [[5, 6, 7, 5, 6], [8, 9]], DataSettings(max_new_tokens=8)
    expected = answer(tiny_model("llama"), prompts, settings, do_sample=True, seed=0)
    model = tiny_model("llama")
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    before = model.generation_config
    said = answer(model, prompts, settings, do_sample=True, seed=0)
    assert [one.tokens.tolist() for one in said] == [one.tokens.tolist() for one in expected]
    assert model.generation_config is before
    assert all(getattr(before, name) == value for name, value in own.items())


def test_answers_of_one_token() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = list(range(97))
    (one,) = answer(model, [[5, 6, 7]], DataSettings(max_new_tokens=3), do_sample=False, seed=0)
    assert one.tokens.shape == (0,)
    assert one.hidden.shape == (0, 32)


def test_the_cache_is_made_once_and_only_for_what_it_is_for(tmp_path: Path) -> None:
    model, settings = tiny_model("llama"), DataSettings(max_new_tokens=6, batch_size=2, answers_per_prompt=2)
    prompts = [[5, 6], [7, 8, 9], [4], [9, 9, 9], [3, 4]]
    cache = AnswerCache(tmp_path, model, None, prompts, settings)
    assert len(cache.shards()) == 6
    counts = [cache.make(shard) for shard in cache.shards()]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(times) == 6
    again = AnswerCache(tmp_path, tiny_model("llama"), None, prompts, settings)
    assert [again.make(shard) for shard in again.shards()] == counts
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")} == times
    answers = again.read()
    assert len(answers.tokens) == len(answers.hidden) == int(answers.lengths.sum()) == sum(counts)
    assert sorted(map(str, answers.prompts)) == sorted(map(str, prompts * 2))
    assert answers.seconds > 0
    part = again.read(max_positions=counts[0] + 1)
    assert len(part.tokens) == counts[0] + counts[1]
    # as several processes leave it that stop at so many tokens each
    shards = again.shards()
    again._path(shards[1]).unlink()
    assert len(again.read(max_positions=counts[0] + 1).tokens) == counts[0] + counts[2]
    with pytest.raises(FileNotFoundError):
        again.read()
    with pytest.raises(TrainingDataError, match="must share that folder"):
        again.read(max_positions=sum(counts))
    tuned = tiny_model("llama")
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight.neg_()
    for other in (
        lambda: AnswerCache(tmp_path, tiny_model("llama", seed=1), None, prompts, settings),
        lambda: AnswerCache(tmp_path, tuned, None, prompts, settings),
        lambda: AnswerCache(tmp_path, model, None, prompts[:-1], settings),
        lambda: AnswerCache(tmp_path, model, None, prompts, DataSettings(max_new_tokens=7, batch_size=2)),
    ):
        with pytest.raises(TrainingDataError, match="another model"):
            other()


def test_a_model_that_is_offloaded_is_known_by_the_rest() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.to("meta")
    found = weights_digest(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.neg_()
    assert weights_digest(model) != found


def _own_prompts(folder: Path, **settings: Any) -> AnswerCache:
    """A model that ends a text at every third token or so, and a tokenizer with a chat template."""
    model, tokenizer = tiny_model("llama"), letter_tokenizer()
    model.generation_config.eos_token_id = list(range(0, 97, 3))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    settings = {"own_prompts": 5, "max_new_tokens": 6, "batch_size": 2, "answers_per_prompt": 1, **settings}
    return AnswerCache(folder, model, tokenizer, [[5, 6], [7, 8, 9], [4]], DataSettings(**settings))


def test_a_model_makes_up_prompts_once_and_answers_them(tmp_path: Path) -> None:
    cache = _own_prompts(tmp_path)
    assert cache.batches_to_ask() == [2, 2, 1]
    for batch in range(3):
        cache.ask(batch)
    own = cache.own_prompts()
    said = [text for path in sorted(tmp_path.glob("own-*.json")) for text in json.loads(path.read_text())["prompts"]]
    assert 0 < len(own) == len({text for text in said if text}) <= 5
    for ids, text in zip(own, dict.fromkeys(text for text in said if text), strict=True):
        assert cache.tokenizer.decode(ids) == f"<user>{text}</user>"
        assert all(token % 3 for token in cache.tokenizer(text)["input_ids"])  # up to where the model stopped
    # once: another process reads what is there
    again = _own_prompts(tmp_path)
    again.model = None
    again.ask(0)
    assert again.own_prompts() == own
    shards = cache.shards()
    assert [shard.name.startswith("own-") for shard in shards] == [False] * 2 + [True] * (len(shards) - 2)
    for shard in shards:
        cache.make(shard)
    answers = cache.read()
    assert sorted(answers.prompts) == sorted([*cache.prompts, *own])
    asked = sum(json.loads(path.read_text())["seconds"] for path in tmp_path.glob("own-*.json"))
    assert answers.seconds > asked > 0
    # what was said twice counts once, and nothing is no prompt
    (tmp_path / "own-00000.json").write_text(json.dumps({"prompts": ["ab", "", "cd", "ab"], "seconds": 1.0}))
    (tmp_path / "own-00001.json").write_text(json.dumps({"prompts": ["cd"], "seconds": 1.0}))
    (tmp_path / "own-00002.json").write_text(json.dumps({"prompts": [], "seconds": 1.0}))
    assert [cache.tokenizer.decode(ids) for ids in cache.own_prompts()] == ["<user>ab</user>", "<user>cd</user>"]
    # another seed, other prompts
    other = _own_prompts(tmp_path / "other", seed=1)
    for batch in range(3):
        other.ask(batch)
    assert other.own_prompts() != own


def test_prompts_that_a_model_cannot_make_up(tmp_path: Path) -> None:
    cache = _own_prompts(tmp_path / "a")
    cache.model.generation_config.eos_token_id = None
    for batch in range(3):
        cache.ask(batch)
    with pytest.raises(TrainingDataError, match="finished none of the 5"):
        cache.shards()
    cache = _own_prompts(tmp_path / "b")
    cache.tokenizer.chat_template = None
    with pytest.raises(TrainingDataError, match="Without a chat template"):
        cache.ask(0)
    cache.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(TrainingDataError, match="nothing before"):
        cache.ask(0)


def test_long_prompts_are_left_out() -> None:
    tokenizer = letter_tokenizer()
    chats = [[{"role": "user", "content": text}] for text in ("abc", "a" * 30)]
    assert encode(tokenizer, chats, most=10) == [tokenizer("abc")["input_ids"]]
