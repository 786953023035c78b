"""The heads in `model_cards/`: what they say of themselves is what they are, and what the pages say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.errors import AdapterError
from hf_specdec.heads import MedusaConfig
from hf_specdec.heads.card import evaluation_tables, model_card
from hf_specdec.heads.kind import kind_of
from hf_specdec.heads.medusa.network import MedusaHeads

ROOT = Path(__file__).parent.parent
SHIPPED = sorted(file.parent for file in (ROOT / "model_cards").glob("*/adapter_config.json"))
EACH: dict[str, Any] = {"argvalues": SHIPPED, "ids": [folder.name for folder in SHIPPED]}


def config_of(folder: Path) -> MedusaConfig:
    config = PeftConfig.from_pretrained(str(folder))
    assert isinstance(config, MedusaConfig)
    return config


def test_heads_are_shipped() -> None:
    assert [folder.name for folder in SHIPPED] == ["SmolLM2-135M-Instruct-medusa"]


@pytest.mark.parametrize("folder", **EACH)
def test_weights_are_small_and_whole(folder: Path) -> None:
    config, file = config_of(folder), folder / "adapter_model.safetensors"
    assert file.stat().st_size < 8_000_000
    saved = {name.rpartition("medusa_heads.")[2]: tensor for name, tensor in load_file(file).items()}
    expected = MedusaHeads(config, hidden_size=576, embedding_size=576, vocab_size=49152).state_dict()
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    learned = [tensor for name, tensor in saved.items() if name != "token_map"]
    assert {tensor.dtype for tensor in learned} == {torch.bfloat16}
    assert all(tensor.isfinite().all() and tensor.any() for tensor in learned)


@pytest.mark.parametrize("folder", **EACH)
def test_another_model_is_refused(folder: Path) -> None:
    """Of the same shape even: the embedding tells."""
    shape = LlamaConfig(
        hidden_size=576, intermediate_size=8, num_hidden_layers=1, num_attention_heads=9, vocab_size=49152
    )
    with pytest.raises(AdapterError, match="another model"):
        LlamaForCausalLM(shape).load_adapter(str(folder))


@pytest.mark.parametrize("folder", **EACH)
def test_the_card_is_made_from_what_was_noted(folder: Path) -> None:
    config = config_of(folder)
    card = ModelCard.load(folder / "README.md")
    assert str(card) == str(model_card(config, f"model_cards/{folder.name}"))
    noted = config.provenance
    assert noted is not None
    trained = json.loads((folder / "training.json").read_text())
    assert {name: noted[name] for name in trained} == trained
    assert noted["command"].startswith("hf-specdec train-heads ")
    assert noted["data_seconds"] + noted["training_seconds"] < 90 * 60
    assert noted["evaluation"]["prompts"] == 60
    assert noted["measured"]["table"].count("\n") == 8, "six tasks and their sum, below a heading"


@pytest.mark.parametrize("folder", **EACH)
def test_the_pages_say_what_was_counted(folder: Path) -> None:
    config = config_of(folder)
    noted = config.provenance
    assert noted is not None
    page = (ROOT / "docs" / "results.md").read_text()
    tables = [table for _, table in evaluation_tables(kind_of(config), noted["evaluation"])]
    assert len(tables) == 2
    assert all(table in page for table in tables)
    # the page has a row per dtype, of speeds and of lengths, and a column per task, in the order of the measured table
    heading, _, *rows = noted["measured"]["table"].splitlines()
    for column, dtype in enumerate(heading.strip("| ").split(" | ")[1:], start=1):
        cells = [row.strip("| ").split(" | ")[column] for row in rows]
        lengths, speeds = zip(*(cell.removesuffix("x)").split(" (") for cell in cells), strict=True)
        assert f"| `medusa`, {dtype} | {' | '.join(lengths)} |" in page
        assert f"| `medusa` | {' | '.join(speeds)} |" in page
