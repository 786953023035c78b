"""A kind of draft heads that comes from one file outside the package goes the whole way of those inside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import letter_tokenizer, run
from outside import head_kind
from outside.head_kind import BoundNetwork, NextTokenConfig
from peft import PeftModel

import hf_specdec
from hf_specdec.cli.app import main
from hf_specdec.errors import AdapterError
from hf_specdec.heads import find_heads, get_head_kind, kind_of
from hf_specdec.testing import tiny_model
from hf_specdec.training import DataSettings, TrainingSettings, train_heads

PROMPTS = ["hello there", "what now", "a longer prompt than these", "one", "two", "three", "ja", "nein", "abc", "xyz"]
STEPS = 20


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    head_kind.register()
    yield
    hf_specdec.unregister_mode(head_kind.NAME)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


def asked(text: str) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([letter_tokenizer()(text)["input_ids"]])}


def test_it_is_known_by_name_and_by_its_settings() -> None:
    assert get_head_kind("next_token") is head_kind.KIND
    assert kind_of(NextTokenConfig()) is head_kind.KIND


def test_it_is_trained_saved_loaded_and_drafts(prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "heads"
    # 20 prompts' answers of 24 tokens, a fifth held out: more positions than 20 batches of 8
    report = train_heads(
        tiny_model("llama"),
        letter_tokenizer(),
        [prompts],
        output,
        config=NextTokenConfig(width=8, draft_vocab_size=60),
        data_settings=DataSettings(max_new_tokens=24, batch_size=4),
        settings=TrainingSettings(epochs=1, batch_size=8, learning_rate=0.02, eval_part=0.2, dtype="float32"),
        progress=False,
    )
    (state,) = (output / "checkpoints").glob("checkpoint-*/trainer_state.json")
    assert json.loads(state.read_text())["global_step"] >= STEPS
    assert report.kind == "next_token"
    assert len(report.heads) == 1
    assert json.loads((output / "adapter_config.json").read_text())["peft_type"] == "NEXT_TOKEN"

    model = tiny_model("llama")
    model.load_adapter(str(output))
    assert isinstance(find_heads(model), BoundNetwork)
    accepted = 0
    for text in PROMPTS:
        plain, _ = run(model, asked(text), max_new_tokens=24)
        with hf_specdec.record() as stats:
            drafted, _ = run(model, asked(text), max_new_tokens=24, speculative_mode="next_token")
        assert drafted.tolist() == plain.tolist()
        accepted += stats.total.accepted
    assert accepted > 0

    expected = find_heads(model).weights.state_dict()
    base = tiny_model("llama")
    PeftModel.from_pretrained(base, output, adapter_name="mine")
    for name, tensor in find_heads(base, "mine").weights.state_dict().items():
        assert torch.equal(tensor, expected[name])
    with pytest.raises(AdapterError, match="no Medusa heads"):
        run(model, asked("one"), max_new_tokens=4, speculative_mode="medusa")


def test_it_is_refused_on_another_model(prompts: Path, tmp_path: Path) -> None:
    from peft import get_peft_model

    get_peft_model(tiny_model("llama", seed=1), NextTokenConfig()).save_pretrained(tmp_path / "heads")
    other = tiny_model("llama", seed=2)
    with pytest.raises(AdapterError, match="another model"):
        other.load_adapter(str(tmp_path / "heads"))
    assert not hasattr(other, "peft_config")


def test_the_command_line_trains_and_evaluates_it(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options come from its settings."""
    base, output = tmp_path / "base", tmp_path / "heads"
    tiny_model("llama").save_pretrained(base)
    letter_tokenizer().save_pretrained(base)
    arguments = ["train-heads", "--base", str(base), "--data", str(prompts), "--output", str(output)]
    arguments += [
        "--kind",
        "next_token",
        "--width",
        "6",
        "--draft-vocab-size",
        "60",
        "--max-new-tokens",
        "12",
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    assert main([*arguments, "--eval-part", "0.3", "--batch-size", "32"]) == 0
    assert "head 1: top-1" in capsys.readouterr().out
    assert json.loads((output / "adapter_config.json").read_text())["width"] == 6
    asking = ["evaluate-heads", str(output), "--data", str(prompts), "--base", str(base), "--max-new-tokens", "12"]
    assert main([*asking, "--nodes", "1", "--device", "cpu"]) == 0
    card = (output / "README.md").read_text()
    assert "A next-token network for base" in card
    assert 'speculative_mode="next_token"' in card
    assert "| task | 1 nodes |" in card
