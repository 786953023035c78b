"""Training: heads learn, are saved, and leave the model alone; a run can be interrupted and shared."""

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
from safetensors.torch import load_file
from transformers import Trainer

import hf_specdec
from hf_specdec.cli.app import main
from hf_specdec.errors import AdapterError, ConfigurationError, TrainingDataError
from hf_specdec.heads import MedusaConfig, TrainedExitConfig
from hf_specdec.testing import tiny_model
from hf_specdec.training import DataSettings, TrainingSettings, train_heads
from hf_specdec.training.answers import AnswerCache
from hf_specdec.training.train import _checkpoint

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
    # on what it was trained on, it predicts more than heads that know nothing
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
    config = TrainedExitConfig(exit_layer=2, draft_vocab_size=80)
    report, _ = _train(prompts, tmp_path / "exit", config=config)
    untrained, _ = _train(
        prompts,
        tmp_path / "untrained",
        config=TrainedExitConfig(exit_layer=2, draft_vocab_size=80),
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
    from hf_specdec.heads.medusa import learning as module

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
    command += ["--max-new-tokens", "16", "--answer-batch-size", "2", "--max-positions", "100"]
    command += ["--epochs", "1", "--eval-part", "0.3", "--batch-size", "16", "--kind", kind, "--draft-vocab-size", "50"]
    command += ["--exit-layer", "2"] if kind == "exit" else ["--num-heads", "2"]
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
        _train(prompts, tmp_path / "x", config=TrainedExitConfig(exit_layer=99))
    assert not (tmp_path / "x").exists(), "no hours of answering before that"
    with pytest.raises(TrainingDataError, match="longer than 1 tokens"):
        _train(prompts, tmp_path / "c", data_settings=DataSettings(max_prompt_tokens=1))
    model = tiny_model("llama").train()
    model.peft_config = {"mine": object()}
    with pytest.raises(ConfigurationError, match="has adapters \\('mine'\\)"):
        train_heads(model, letter_tokenizer(), [prompts], tmp_path / "d", MedusaConfig())
    del model.peft_config
    with pytest.raises(TrainingDataError):
        train_heads(model, letter_tokenizer(), [tmp_path / "absent.jsonl"], tmp_path / "e", MedusaConfig())
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
