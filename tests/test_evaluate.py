"""Evaluating heads along recorded answers: the counts are those that decoding itself meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import letter_tokenizer, model_with_heads, prompt, run
from huggingface_hub import ModelCard
from peft import PeftConfig, get_peft_model, inject_adapter_in_model

import hf_specdec
from hf_specdec import EarlyExitDrafter
from hf_specdec.cli.app import main
from hf_specdec.drafters.medusa import MedusaDrafter, MedusaModeConfig
from hf_specdec.errors import AdapterError, ConfigurationError, TrainingDataError
from hf_specdec.heads import MedusaConfig, TrainedExitConfig, find_heads
from hf_specdec.heads.answers import PER_TOKEN, Answers
from hf_specdec.heads.medusa.learning import accuracy_along
from hf_specdec.testing import tiny_model
from hf_specdec.training import evaluate_heads
from hf_specdec.training.data import DataSettings, answer, joined
from hf_specdec.training.evaluate import acceptance_along
from hf_specdec.training.prompts import encode


def said_by(model: Any, new_tokens: int) -> tuple[Answers, dict[str, torch.Tensor]]:
    inputs = prompt(3, padding=3, repeat=True)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    said = answer(model, prompts, DataSettings(max_new_tokens=new_tokens), do_sample=False, seed=0)
    return joined(said, prompts), inputs


def along(model: Any, answers: Answers, nodes: int, prompt_lookup: bool = False) -> list[tuple[int, int]]:
    drafter = MedusaDrafter(find_heads(model), MedusaModeConfig(prompt_lookup=prompt_lookup))
    return acceptance_along(model, drafter, answers, nodes)


@pytest.mark.parametrize("head_type", ["independent", "sequential"])
@pytest.mark.parametrize("nodes", [1, 4, 9])
@pytest.mark.parametrize("prompt_lookup", [False, True])
def test_acceptance_is_what_decoding_meets(head_type: str, nodes: int, prompt_lookup: bool) -> None:
    model = model_with_heads("llama", head_type)
    answers, inputs = said_by(model, 40)
    with hf_specdec.record() as stats:
        run(
            model,
            inputs,
            max_new_tokens=40,
            speculative_mode="medusa",
            speculative_config={"num_draft_tokens": nodes, "prompt_lookup": prompt_lookup},
        )
    counted = along(model, answers, nodes, prompt_lookup)
    assert [tokens for tokens, _ in counted] == [row.tokens - 1 for row in stats.rows]
    # kept hidden states are rounded to bfloat16, which may turn a draft here and there
    assert [rounds for _, rounds in counted] == pytest.approx([row.rounds for row in stats.rows], abs=1)
    assert sum(rounds for _, rounds in counted) < 0.9 * sum(tokens for tokens, _ in counted)


def test_an_answer_without_tokens_costs_no_round() -> None:
    """The last prompt's answer ends at once."""
    model = model_with_heads("llama")
    answers, _ = said_by(model, 20)
    expected = along(model, answers, 4)
    with_empty = Answers(
        **{name: getattr(answers, name) for name in PER_TOKEN},
        lengths=torch.tensor([*answers.lengths.tolist(), 0]),
        prompts=[*answers.prompts, [5, 6]],
    )
    assert along(model, with_empty, 4) == [*expected, (0, 0)]


def test_look_ups_read_the_prompt_too() -> None:
    """An answer that repeats a part of its prompt, in one round as far as the trees reach."""
    model = model_with_heads("llama")
    answers = Answers(
        tokens=torch.tensor([21, 22, 23, 24, 25, 26]),
        hidden=torch.zeros(6, 32),
        label_tokens=torch.zeros(6, 1, dtype=torch.long),
        label_probabilities=torch.ones(6, 1),
        lengths=torch.tensor([6]),
        prompts=[[3, 20, 21, 22, 23, 24, 25, 26, 4, 20]],
    )
    assert along(model, answers, 40, prompt_lookup=True) == [(5, 1)]
    assert along(model, answers, 40)[0][1] > 1


def test_accuracy_is_of_every_position() -> None:
    model = model_with_heads("llama", "independent")
    heads = find_heads(model)
    answers, _ = said_by(model, 20)
    found = accuracy_along(heads, answers)
    texts = answers.tokens.long().split(answers.lengths.tolist())
    hidden = answers.hidden.float().split(answers.lengths.tolist())
    for head, one in enumerate(found):
        right = within = seen = 0
        for tokens, states in zip(texts, hidden, strict=True):
            count = len(tokens) - 1 - head
            logits = heads.all_logits(heads.all_states(states[:count]))[head]
            best = logits.topk(10).indices
            target = tokens[1 + head :]
            right += int((best[:, 0] == target).sum())
            within += int((best == target[:, None]).sum())
            seen += count
        assert one["top1"] == pytest.approx(right / seen, abs=1e-3)
        assert one["top10"] == pytest.approx(within / seen, abs=1e-3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [("a", "hello there"), ("b", "what now"), ("a", "a longer prompt than these")]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "task": task}) + "\n" for task, text in rows))
    return file


def test_tasks_and_their_sum(prompts: Path) -> None:
    model = model_with_heads()
    found = evaluate_heads(model, letter_tokenizer(), prompts, nodes=[1, 6], max_new_tokens=24, progress=False)
    assert list(found.tables["acceptance"]) == ["a", "b", "overall"]
    assert (found.prompts, found.nodes, found.max_new_tokens, found.data) == (3, [1, 6], 24, "asked.jsonl")
    assert all(1.0 <= chain <= tree <= 4.0 for chain, tree in found.tables["acceptance"].values())
    assert len(found.heads) == 3
    one = evaluate_heads(model, letter_tokenizer(), prompts, nodes=[6], max_new_tokens=24, per_task=1, progress=False)
    assert one.prompts == 2


def test_every_size_is_counted_and_tasks_add_up(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(model: Any, drafter: Any, answers: Answers, nodes: int) -> list[tuple[int, int]]:
        return [((20 if drafter.config.prompt_lookup else 10) * nodes, 10), (30, 20), (50 * nodes, 30)]

    monkeypatch.setattr("hf_specdec.training.evaluate.acceptance_along", counted)
    found = evaluate_heads(model_with_heads(), letter_tokenizer(), prompts, nodes=[1, 2], progress=False)
    assert found.tables["acceptance"] == {"a": [1.5, 3.0], "b": [1.5, 1.5], "overall": [1.5, 2.5]}
    assert found.tables["acceptance_with_lookup"] == {"a": [1.75, 3.5], "b": [1.5, 1.5], "overall": [1.667, 2.833]}


@pytest.mark.parametrize("settings", [{"nodes": []}, {"nodes": [0]}, {"max_new_tokens": 1}, {"batch_size": 0}])
def test_settings_are_checked(prompts: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="at least"):
        evaluate_heads(model_with_heads(), letter_tokenizer(), prompts, **settings)


def test_answers_too_short_to_count_on(prompts: Path) -> None:
    with pytest.raises(TrainingDataError, match="longest answer has 3 tokens, too few for 3 heads"):
        evaluate_heads(model_with_heads(), letter_tokenizer(), prompts, max_new_tokens=3, progress=False)


def test_a_model_without_heads(prompts: Path) -> None:
    with pytest.raises(AdapterError, match="no draft heads"):
        evaluate_heads(tiny_model("llama"), letter_tokenizer(), prompts)


def test_the_command_line_writes_the_card(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, heads = tmp_path / "base", tmp_path / "heads"
    tiny_model("llama").save_pretrained(base)
    letter_tokenizer().save_pretrained(base)
    model = get_peft_model(tiny_model("llama"), MedusaConfig(num_heads=2, provenance={"positions": 5}))
    model.save_pretrained(heads, save_embedding_layers=False)
    before = (heads / "adapter_model.safetensors").read_bytes()
    arguments = ["evaluate-heads", str(heads), "--data", str(prompts), "--nodes", "2", "5", "--max-new-tokens", "12"]
    assert main(arguments) == 2
    assert "pass --base" in capsys.readouterr().err
    assert main([*arguments, "--base", str(base), "--repo", "me/heads"]) == 0
    assert "| task | 2 nodes | 5 nodes |" in capsys.readouterr().out
    card = ModelCard.load(heads / "README.md").text
    assert "On 3 prompts of other sources (asked.jsonl), greedy, 12 new tokens" in card
    assert 'load_adapter("me/heads")' in card
    config = PeftConfig.from_pretrained(str(heads))
    assert isinstance(config, MedusaConfig)
    assert config.provenance is not None
    assert config.provenance["positions"] == 5
    assert list(config.provenance["evaluation"]["acceptance"]) == ["a", "b", "overall"]
    assert (heads / "adapter_model.safetensors").read_bytes() == before


# ---------------------------------------------------------------- a trained exit


def model_with_exit(**config: Any) -> Any:
    model = tiny_model("llama")
    inject_adapter_in_model(TrainedExitConfig(exit_layer=2, **config), model)
    return model


@torch.no_grad()
def test_an_exit_is_counted_at_every_token(prompts: Path) -> None:
    model, tokenizer = model_with_exit(draft_vocab_size=40), letter_tokenizer()
    exit_ = find_heads(model)
    exit_.draft_from(torch.arange(5, 45))
    for weight in exit_.weights.layer.parameters():
        weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    found = evaluate_heads(model, tokenizer, prompts, max_new_tokens=24, batch_size=2, progress=False)
    hits: dict[str, list[list[bool]]] = {"a": [[], []], "b": [[], []]}
    within = []
    for line in prompts.read_text().splitlines():
        asked = json.loads(line)
        ids = torch.tensor(encode(tokenizer, [[{"role": "user", "content": asked["prompt"]}]]))
        length = ids.shape[1]
        text = model.generate(ids, max_new_tokens=24, do_sample=False)
        hidden = model(text[:, :-1], output_hidden_states=True).hidden_states[2]
        own = model.lm_head(model.model.norm(hidden))[0, length - 1 :].argmax(-1)
        scores = exit_.shared_logits(exit_.states(hidden, torch.ones(1, hidden.shape[1], dtype=torch.bool)))
        best = 5 + scores[0, length - 1 :].topk(10).indices
        said = text[0, length:]
        hits[asked["task"]][0] += (own == said).tolist()
        hits[asked["task"]][1] += (best[:, 0] == said).tolist()
        within += (best == said[:, None]).any(1).tolist()
    hits["overall"] = [[*hits["a"][way], *hits["b"][way]] for way in (0, 1)]
    expected = {task: [sum(way) / len(way) for way in ways] for task, ways in hits.items()}
    assert list(found.tables["first_token"]) == ["a", "b", "overall"]
    for task, ways in expected.items():
        assert found.tables["first_token"][task] == pytest.approx(ways, abs=1e-3)
    assert found.positions == len(within)
    assert found.heads[0]["top10"] == pytest.approx(sum(within) / len(within), abs=1e-3)
    assert found.heads[0]["top1"] == pytest.approx(expected["overall"][1], abs=1e-3)
    assert 0.0 < found.heads[0]["top1"] < found.heads[0]["top10"] < 1.0
    assert expected["overall"][0] != expected["overall"][1]


def test_what_cannot_be_counted_of_an_exit(prompts: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nodes are of trees.*'exit'"):
        evaluate_heads(model_with_exit(), letter_tokenizer(), prompts, nodes=[2], progress=False)
    with pytest.raises(ConfigurationError, match="at least"):
        evaluate_heads(model_with_exit(), letter_tokenizer(), prompts, max_new_tokens=2)
    model = model_with_exit()
    answers, _ = said_by(model, 8)
    with pytest.raises(ConfigurationError, match="EarlyExitDrafter reads hidden states of layers"):
        acceptance_along(model, EarlyExitDrafter(model, None, find_heads(model)), answers, 2)


def test_the_command_line_evaluates_an_exit(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder = tmp_path / "base", tmp_path / "exit"
    tiny_model("llama").save_pretrained(base)
    letter_tokenizer().save_pretrained(base)
    model = get_peft_model(tiny_model("llama"), TrainedExitConfig(exit_layer=2))
    model.save_pretrained(folder, save_embedding_layers=False)
    arguments = ["evaluate-heads", str(folder), "--data", str(prompts), "--base", str(base), "--max-new-tokens", "12"]
    assert main([*arguments, "--nodes", "2"]) == 2
    assert "nodes are of trees" in capsys.readouterr().err
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "exit: top-1 " in said
    assert "| task | norm and LM head alone | trained |" in said
    assert "| overall |" in ModelCard.load(folder / "README.md").text
