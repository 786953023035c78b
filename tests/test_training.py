"""Training: what is recorded is what the model said, losses are the formulas, and a run can be interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import letter_tokenizer, prompt, run
from hf_specdec.cli.app import main
from safetensors.torch import load_file
from test_exit import hidden_at_exit
from transformers import Trainer

import hf_specdec
from hf_specdec.errors import AdapterError, ConfigurationError, TrainingDataError
from hf_specdec.heads import MedusaConfig
from hf_specdec.testing import tiny_model
from hf_specdec.training import DataSettings, TrainingSettings, read_prompts, train_heads
from hf_specdec.training.answers import AnswerCache, weights_digest
from hf_specdec.training.data import Answers, answer
from hf_specdec.training.exit import Texts, states_at_exit
from hf_specdec.training.losses import distillation_loss, feature_loss, head_weights
from hf_specdec.training.medusa import Positions
from hf_specdec.training.prompts import encode
from hf_specdec.training.train import _checkpoint, frequent_tokens

PROMPTS = ["hello there", "what now", "a longer prompt than these", "one", "two", "three", "ja", "nein", "abc", "xyz"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_model("llama").save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- prompts


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
    (chat,) = read_prompts(file)
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
        read_prompts(file)


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="`datasets` is an extra")
    datasets.Dataset.from_list([{"prompt": text} for text in PROMPTS]).save_to_disk(tmp_path / "set")
    assert [chat[0]["content"] for chat in read_prompts(tmp_path / "set")] == PROMPTS
    with pytest.raises(TrainingDataError, match="cannot be read as a data set"):
        read_prompts(tmp_path)


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


# ---------------------------------------------------------------- positions and losses


def _answers() -> Answers:
    """Two answers, of 4 tokens and of 2; everything says where it stands."""
    tokens = torch.tensor([10, 11, 12, 13, 20, 21], dtype=torch.int32)
    return Answers(
        tokens=tokens,
        hidden=tokens[:, None].bfloat16().expand(-1, 3),
        label_tokens=torch.stack([tokens, tokens + 50], dim=1),
        label_probabilities=torch.tensor([[0.75, 0.25]]).half().expand(6, -1),
        lengths=torch.tensor([4, 2], dtype=torch.int32),
        prompts=[[7, 8, 9], [6]],
    )


def test_positions_line_up() -> None:
    output_of = torch.full((97,), -1)
    output_of[[11, 12, 13, 21, 62]] = torch.arange(5)
    positions = Positions(_answers(), num_heads=2, output_of=output_of)
    assert len(positions) == 4  # the last token of an answer has nothing ahead
    batch = positions.__getitems__(range(4))
    assert batch["hidden"][:, 0].tolist() == [10, 11, 12, 20]
    assert batch["exists"].tolist() == [[True, True], [True, True], [True, False], [True, False]]
    seen = batch["exists"]
    assert batch["before"][:, 0].tolist() == [10, 11, 12, 20]  # what the last hidden state gave: the root of the draft
    assert batch["before"][:2, 1].tolist() == [11, 12]
    assert batch["target"][seen].tolist() == [0, 1, 1, 2, 2, 3]  # outputs of tokens 11 12, 12 13, 13, 21
    assert batch["features"][..., 0][seen].tolist() == [11, 12, 12, 13, 13, 21]
    assert batch["label_outputs"][0].tolist() == [[0, -1], [1, 4]]  # 11 and 61, 12 and 62
    assert positions[3]["hidden"].tolist() == [20, 20, 20]


def test_distillation_loss_is_the_cross_entropy_over_what_can_be_drafted() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]]).expand(3, -1)
    outputs = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    probabilities = torch.tensor([[0.6, 0.2], [0.3, 0.7], [0.5, 0.5]])
    log_q = logits[0].log_softmax(-1)
    expected = [-(0.75 * log_q[0] + 0.25 * log_q[1]), -log_q[2], torch.tensor(0.0)]
    torch.testing.assert_close(distillation_loss(logits, outputs, probabilities), torch.stack(expected))


def test_the_other_losses() -> None:
    state, hidden = torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 0.0]])
    torch.testing.assert_close(feature_loss(state, hidden), torch.tensor([(0.5 * 0.25 + 2.5) / 2]))
    torch.testing.assert_close(head_weights(3, 0.5), torch.tensor([4.0, 2.0, 1.0]) / 7)


def test_frequent_tokens() -> None:
    answers = _answers()
    # every token counts once, and 0.75 as a label; 50 more counts 0.25
    assert frequent_tokens(answers, 6, 97).tolist() == [10, 11, 12, 13, 20, 21]
    assert frequent_tokens(answers, 8, 97).tolist() == [10, 11, 12, 13, 20, 21, 60, 61]


def test_split_keeps_prompts_together_and_loses_nothing() -> None:
    lengths = torch.randint(1, 5, (400,), generator=torch.Generator().manual_seed(0)).int()
    count = int(lengths.sum())
    each = torch.arange(count)
    prompts = [[number, 5] for number in range(200)] * 2
    answers = Answers(each, each[:, None], each[:, None], each[:, None], lengths, prompts)
    training, held_out = answers.split(0.2)
    assert sorted([*training.tokens.tolist(), *held_out.tokens.tolist()]) == list(range(count))
    assert not {tuple(prompt) for prompt in training.prompts} & {tuple(prompt) for prompt in held_out.prompts}
    assert 0.1 < len(held_out.lengths) / 400 < 0.3
    assert training.hidden[:, 0].tolist() == training.tokens.tolist()
    with pytest.raises(TrainingDataError, match="do not match"):
        Answers(each, each, each, each, lengths[:-1], prompts)


def test_states_at_an_exit_are_those_of_the_whole_text(tmp_path: Path) -> None:
    model, said = tiny_model("llama"), _answers()
    states = states_at_exit(model, said, 2, tmp_path / "states.safetensors", progress=False)
    for index, text in enumerate(([7, 8, 9, 10, 11, 12], [6, 20])):
        torch.testing.assert_close(states[index].float(), hidden_at_exit(model, text), rtol=0.02, atol=0.02)
    again = states_at_exit(None, said, 2, tmp_path / "states.safetensors", progress=False)
    assert [state.tolist() for state in again] == [state.tolist() for state in states]
    texts = Texts(said, states, torch.arange(97))
    batch = texts.__getitems__([0, 1])
    assert batch["mask"].sum(1).tolist() == [6, 2]
    # the first token of an answer follows the last of its prompt
    assert batch["exists"].tolist() == [
        [False, False, True, True, True, True],
        [True, True, False, False, False, False],
    ]
    assert batch["target"][batch["exists"]].tolist() == [10, 11, 12, 13, 20, 21]
    assert batch["features"][..., 0][batch["exists"]].tolist() == [10, 11, 12, 13, 20, 21]


# ---------------------------------------------------------------- the whole way

_DATA = DataSettings(max_new_tokens=24, batch_size=4, answers_per_prompt=2)
_SETTINGS = TrainingSettings(epochs=3, batch_size=32, learning_rate=0.02, eval_part=0.3, dtype="float32")


def _train(prompts: Path, output: Path, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    settings = {
        "config": MedusaConfig(num_heads=2, head_type="sequential"),
        "data_settings": _DATA,
        "settings": _SETTINGS,
    }
    report = train_heads(
        tiny_model("llama"), letter_tokenizer(), [prompts], output, progress=False, **{**settings, **changes}
    )
    return report, load_file(output / "adapter_model.safetensors")


def test_training_learns_saves_and_leaves_the_model_alone(prompts: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    flags = [weight.requires_grad for weight in model.parameters()]
    report = train_heads(
        model,
        letter_tokenizer(),
        [prompts],
        tmp_path / "heads",
        config=MedusaConfig(num_heads=2, head_type="sequential", draft_vocab_size=60),
        data_settings=_DATA,
        settings=_SETTINGS,
        base_name="org/tiny",
        progress=False,
    )
    assert {key: tensor.tolist() for key, tensor in model.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in before.items()
    }
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert not hasattr(model, "peft_config")
    assert report.positions > 50
    assert len(report.heads) == 2
    assert all(0 <= head["top1"] <= head["top10"] <= 1 for head in report.heads)
    assert json.loads((tmp_path / "heads" / "training.json").read_text())["heads"] == report.heads
    config = json.loads((tmp_path / "heads" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
    # on what it was trained on, it foresees more than heads that know nothing
    model.load_adapter(str(tmp_path / "heads"))
    inputs = {"input_ids": torch.tensor([letter_tokenizer()("hello there")["input_ids"]])}
    with hf_specdec.record() as stats:
        run(model, inputs, max_new_tokens=20, speculative_mode="medusa", speculative_config={"num_draft_tokens": 8})
    assert stats.mean_acceptance_length > 1.2


def test_gradients_are_not_clipped(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm is above the trainer's usual limit at every step, and with it later heads learned markedly less."""
    limits, train = [], Trainer.train

    def watched(self: Trainer, **arguments: Any) -> Any:
        limits.append(self.args.max_grad_norm)
        return train(self, **arguments)

    monkeypatch.setattr(Trainer, "train", watched)
    _train(prompts, tmp_path / "heads")
    assert limits == [0.0]


def test_a_trained_exit_agrees_with_the_model_more_than_an_untrained_one(prompts: Path, tmp_path: Path) -> None:
    config = MedusaConfig(head_type="exit", exit_layer=2, draft_vocab_size=80)
    report, _ = _train(prompts, tmp_path / "exit", config=config)
    untrained, _ = _train(
        prompts,
        tmp_path / "untrained",
        config=MedusaConfig(head_type="exit", exit_layer=2, draft_vocab_size=80),
        settings=TrainingSettings(**{**vars(_SETTINGS), "learning_rate": 1e-9}),
    )
    assert len(report.heads) == 1
    assert report.heads[0]["loss"] < untrained.heads[0]["loss"]
    model = tiny_model("llama")
    model.load_adapter(str(tmp_path / "exit"))
    plain, _ = run(model, prompt(2, padding=2), max_new_tokens=16)
    with hf_specdec.record() as stats:
        output, _ = run(model, prompt(2, padding=2), max_new_tokens=16, speculative_mode="early_exit")
    assert output.tolist() == plain.tolist()
    assert stats.mode == "early_exit"


def test_the_same_seed_gives_the_same_heads_and_another_does_not(prompts: Path, tmp_path: Path) -> None:
    _, first = _train(prompts, tmp_path / "a")
    _, second = _train(prompts, tmp_path / "b")
    assert {key: tensor.tolist() for key, tensor in first.items()} == {
        key: tensor.tolist() for key, tensor in second.items()
    }
    _, third = _train(prompts, tmp_path / "c", settings=TrainingSettings(**{**vars(_SETTINGS), "seed": 1}))
    assert any(not torch.equal(first[key], third[key]) for key in first)


def test_an_interrupted_training_goes_on_and_ends_the_same(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = _train(prompts, tmp_path / "whole")

    class PowerCut(Exception):
        pass

    # while answering: after three batches
    made = []
    original = AnswerCache.make

    def make(self: AnswerCache, shard: Any) -> int:
        if len(made) == 3:
            raise PowerCut
        made.append(shard.name)
        return original(self, shard)

    output = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(AnswerCache, "make", make)
        with pytest.raises(PowerCut):
            _train(prompts, output)
    assert len(list((output / "answers").glob("*.safetensors"))) == 3
    # while training: after the first epoch
    from hf_specdec.training import medusa as module

    forward = module.HeadsInTraining.forward

    def cut(self: Any, **batch: Any) -> Any:
        if self.training and any((output / "checkpoints").glob("checkpoint-*")):
            raise PowerCut
        return forward(self, **batch)

    with monkeypatch.context() as patch:
        patch.setattr(module.HeadsInTraining, "forward", cut)
        with pytest.raises(PowerCut):
            _train(prompts, output)
    assert len(list((output / "checkpoints").glob("checkpoint-*"))) == 1
    # while a checkpoint is written: its weights are there, what is written after them is not
    (output / "checkpoints" / "checkpoint-999").mkdir()
    (output / "checkpoints" / "checkpoint-999" / "model.safetensors").touch()
    (whole,) = (output / "checkpoints").glob("checkpoint-[!9]*")
    assert _checkpoint(output / "checkpoints") == str(whole)
    config = MedusaConfig(num_heads=2, head_type="sequential")
    with monkeypatch.context() as patch:
        patch.setattr(module.HeadsInTraining, "forward", cut)
        with pytest.raises(PowerCut):
            _train(prompts, output, config=config)
    report, resumed = _train(prompts, output, config=config)  # the caller's config is the caller's
    assert report.resumed
    assert config.to_dict() == MedusaConfig(num_heads=2, head_type="sequential").to_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(resumed[key], tensor)
    with pytest.raises(TrainingDataError, match="other settings"):
        _train(prompts, output, settings=TrainingSettings(**{**vars(_SETTINGS), "epochs": 4}))


def test_command_line(prompts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train-heads", "--base", str(base), "--data", str(prompts), "--output", str(tmp_path / "heads")]
    arguments += ["--num-heads", "2", "--draft-vocab-size", "50", "--max-new-tokens", "16", "--epochs", "1"]
    arguments += ["--eval-part", "0.3", "--batch-size", "64", "--kind", "independent", "--device", "cpu"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "head 1: top-1" in said
    assert "head 2: top-1" in said
    report = json.loads((tmp_path / "heads" / "training.json").read_text())
    assert report["command"].startswith("hf-specdec")
    config = json.loads((tmp_path / "heads" / "adapter_config.json").read_text())
    hidden_size = config["hidden_size"]
    assert config["output_rank"] == hidden_size // 6
    weights = load_file(tmp_path / "heads" / "adapter_model.safetensors")
    prefix = "base_model.model.spec_head_container.medusa_heads.output"
    assert weights[f"{prefix}.up.weight"].shape == (50, hidden_size // 6)
    assert main([*arguments[:4], str(tmp_path / "absent.jsonl"), *arguments[5:]]) == 2


@pytest.mark.parametrize("kind", ["sequential", "exit"])
def test_two_processes_share_the_work(prompts: Path, base: Path, tmp_path: Path, kind: str) -> None:
    """Each stops answering by its own count, so what is read has gaps."""
    output = tmp_path / "heads"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["-m", "hf_specdec", "train-heads", "--base", str(base), "--data", str(prompts), "--output", str(output)]
    command += ["--num-heads", "2", "--max-new-tokens", "16", "--answer-batch-size", "2", "--max-positions", "100"]
    command += ["--epochs", "1", "--eval-part", "0.3", "--batch-size", "16", "--kind", kind, "--draft-vocab-size", "50"]
    command += ["--exit-layer", "2"] if kind == "exit" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((output / "training.json").read_text())
    assert report["positions"] + report["held_out_positions"] >= 100
    assert len(list((output / "answers").glob("*.safetensors"))) < 10, "not all 20 prompts' batches were answered"
    weights = load_file(output / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_what_cannot_be_trained_on(prompts: Path, tmp_path: Path) -> None:
    short = DataSettings(max_new_tokens=3, batch_size=4)
    with pytest.raises(TrainingDataError, match="longest answer has"):
        _train(prompts, tmp_path / "a", data_settings=short, config=MedusaConfig(num_heads=4))
    # where nothing was trained, nothing stands in the way of what the error recommends
    assert _train(prompts, tmp_path / "a", data_settings=short, config=MedusaConfig(num_heads=1))[0].positions
    with pytest.raises(TrainingDataError, match="too few answers"):
        _train(prompts, tmp_path / "b", settings=TrainingSettings(eval_part=1e-9))
    with pytest.raises(AdapterError, match="after layer 99"):
        _train(prompts, tmp_path / "x", config=MedusaConfig(head_type="exit", exit_layer=99))
    assert not (tmp_path / "x").exists(), "no hours of answering before that"
    with pytest.raises(TrainingDataError, match="longer than 1 tokens"):
        _train(prompts, tmp_path / "c", data_settings=DataSettings(max_prompt_tokens=1))
    model = tiny_model("llama").train()
    model.peft_config = {"mine": object()}
    with pytest.raises(ConfigurationError, match="has adapters \\('mine'\\)"):
        train_heads(model, letter_tokenizer(), [prompts], tmp_path / "d")
    del model.peft_config
    with pytest.raises(TrainingDataError):
        train_heads(model, letter_tokenizer(), [tmp_path / "absent.jsonl"], tmp_path / "e")
    assert model.training


def test_settings_are_checked() -> None:
    for settings in (
        {"own_prompts": -1},
        {"answers_per_prompt": 0},
        {"batch_size": 0},
        {"temperature": 0.0},
        {"max_new_tokens": 2},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            DataSettings(**settings)
    for settings in (
        {"epochs": 0},
        {"learning_rate": -1.0},
        {"eval_part": 1.0},
        {"max_positions": 0},
        {"dtype": "bf16"},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            TrainingSettings(**settings)
