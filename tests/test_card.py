"""The model card says what was noted down, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig, get_peft_model

from hf_specdec.cli.app import main
from hf_specdec.heads import MedusaConfig, TrainedExitConfig
from hf_specdec.heads.card import MARK, measured_by, model_card, save_card
from hf_specdec.testing import tiny_model

PROVENANCE: dict[str, Any] = {
    "positions": 123456,
    "held_out_positions": 789,
    "data": ["prompts.jsonl", "org/data"],
    "data_seconds": 3000.0,
    "training_seconds": 61.0,
    "machine": "a machine, 2 threads",
    "command": "hf-specdec train-heads --base org/model",
    "versions": {"torch": "2.13.0", "peft": "0.21.2"},
    "heads": [{"loss": 1.5, "top1": 0.4321, "top10": 0.7654}, {"loss": 2.5, "top1": 0.2, "top10": 0.6}],
}


def config(**changes: Any) -> MedusaConfig:
    settings = {"num_heads": 2, "head_type": "sequential", "draft_vocab_size": 60, "provenance": PROVENANCE}
    return MedusaConfig(base_model_name_or_path="org/model", **{**settings, **changes})


def with_heads() -> Any:
    settings = config()
    settings.base_model_name_or_path = None  # the tiny model was not loaded from anywhere
    model = get_peft_model(tiny_model("llama"), settings)
    settings.base_model_name_or_path = "org/model"
    return model


def test_the_card_says_what_was_noted() -> None:
    card = model_card(config(revision="abc123", vocab_size=97), "me/heads")
    assert card.data.base_model == "org/model"
    assert card.data.library_name == "peft"
    assert "hydra" in card.data.tags
    text = " ".join(str(card).split())
    for said in (
        "Sequential draft heads",
        "revision `abc123`",
        'model.load_adapter("me/heads")',
        "60 of 97 tokens",
        "123,456 positions from prompts.jsonl, org/data",
        "took 50 min, training 61 s on a machine, 2 threads",
        "hf-specdec train-heads --base org/model",
        "torch 2.13.0, peft 0.21.2",
        "789 positions of held-out prompts",
        "| 1 | 2 ahead | 0.432 | 0.765 | 1.50 |",
        "| 2 | 3 ahead | 0.200 | 0.600 | 2.50 |",
        "Not measured.",
    ):
        assert said in text, said
    assert "made up itself" not in text
    own = {**PROVENANCE, "data_settings": {"own_prompts": 640}}
    assert "org/data and from prompts that it made up itself (it was asked for 640)" in str(
        model_card(config(provenance=own))
    )
    assert "hydra" not in model_card(config(head_type="independent")).data.tags
    for settings, said in (
        ({}, "the output layer is the base model's"),
        ({"output_rank": 12}, "an output layer of rank 12."),
        ({"own_lm_head": True}, "output layers of their own"),
    ):
        assert said in str(model_card(config(**settings)))


def test_the_card_of_an_exit() -> None:
    settings: dict[str, Any] = {"draft_vocab_size": 60, "provenance": PROVENANCE}
    card = model_card(TrainedExitConfig(base_model_name_or_path="org/model", exit_layer=12, **settings), "me/exit")
    assert {"kangaroo", "early-exit"} < set(card.data.tags)
    assert "medusa" not in str(card)
    text = " ".join(str(card).split())
    for said in (
        "# A trained early exit for model",
        "A decoder layer on the hidden states above layer 12, drafting from 60 of",
        'speculative_mode="early_exit"',
        "| 1 | 1 ahead | 0.432 |",
        "It stands in for the layers above while drafting",
    ):
        assert said in text, said
    assert "heads of" not in text


def test_the_card_says_what_was_evaluated() -> None:
    evaluation = {
        "data": "asked.jsonl",
        "prompts": 6,
        "positions": 768,
        "max_new_tokens": 128,
        "heads": [{"loss": 1.5, "top1": 0.111, "top10": 0.222}, {"loss": 2.5, "top1": 0.333, "top10": 0.444}],
        "nodes": [2, 15],
        "acceptance": {"overall": [1.25, 1.75], "qa": [1.234, 1.5]},
        "acceptance_with_lookup": {"qa": [1.5, 2.0], "overall": [1.51, 2.01]},
    }
    text = str(model_card(config(provenance={**PROVENANCE, "evaluation": evaluation})))
    for said in (
        "On 6 prompts of other sources (asked.jsonl), greedy, 128 new tokens:",
        "| 2 | 3 ahead | 0.333 | 0.444 | 2.50 |\n\nMean",
        "| task | 2 nodes | 15 nodes |\n|---|---|---|\n| qa | 1.23 | 1.50 |\n| overall | 1.25 | 1.75 |\n\nThe same",
        "| qa | 1.50 | 2.00 |\n| overall | 1.51 | 2.01 |\n\n## Speed",
    ):
        assert said in text, text


def test_saving_writes_the_card_and_leaves_one_that_was_written(tmp_path: Path) -> None:
    model = with_heads()
    model.save_pretrained(tmp_path / "new", save_embedding_layers=False)
    card = ModelCard.load(tmp_path / "new" / "README.md")
    assert "123,456 positions" in card.text
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").write_text("---\nlicense: mit\n---\nMy own words.\n")
    model.save_pretrained(tmp_path / "own", save_embedding_layers=False)
    assert "My own words." in (tmp_path / "own" / "README.md").read_text()
    assert "123,456" not in (tmp_path / "own" / "README.md").read_text()

    model.active_peft_config.provenance = {**PROVENANCE, "positions": 654321}
    card.data.tags.append("of-my-own")
    card.save(tmp_path / "new" / "README.md")
    model.save_pretrained(tmp_path / "new", save_embedding_layers=False)
    again = ModelCard.load(tmp_path / "new" / "README.md")
    assert "654,321 positions" in again.text
    assert "of-my-own" in again.data.tags
    kept = again.content.replace(MARK, "My own words.")
    (tmp_path / "new" / "README.md").write_text(kept)
    model.active_peft_config.provenance = PROVENANCE
    model.save_pretrained(tmp_path / "new", save_embedding_layers=False)
    stayed = ModelCard.load(tmp_path / "new" / "README.md").text
    assert stayed.startswith(ModelCard(kept).text.rstrip())  # PEFT notes its version below
    assert "123,456" not in stayed


def test_what_somebody_wrote_into_a_card_stays(tmp_path: Path) -> None:
    path, template = tmp_path / "README.md", ModelCard.from_template(ModelCardData()).content
    for written in (
        template.replace("[More Information Needed]", "My own words.", 3),
        "My own words.\n",
        "---\nlicense: mit\n---\nMy own words.\n",
        "---\nlicense: [mit\n---\nNo YAML above.\n",
        "---\n- mit\n---\nNo mapping above.\n",
    ):
        path.write_text(written)
        assert not save_card(config(), path)
        assert path.read_text() == written
    for blank in (template, "---\nlicense: mit\ntags: mine\n---\n", ""):
        path.write_text(blank)
        assert save_card(config(), path)
        assert "123,456 positions" in path.read_text()
    path.write_text("---\nlicense: mit\ntags: mine\n---\n")
    save_card(config(), path)
    save_card(config(), path)
    data = ModelCard.load(path).data
    assert data.license == "mit"
    assert data.tags.count("mine") == 1
    assert data.base_model == "org/model"


def test_the_card_of_heads_in_a_folder() -> None:
    said = str(model_card(config(), "me/heads", "small"))
    assert 'model.load_adapter("me/heads", adapter_kwargs={"subfolder": "small"})' in said


def test_the_card_of_heads_that_others_trained() -> None:
    """Converted, and then measured: nothing is made up about their training."""
    evaluation = {
        "data": "asked.jsonl",
        "prompts": 6,
        "max_new_tokens": 128,
        "heads": [{"loss": 1.5, "top1": 0.111, "top10": 0.222}],
        "nodes": [2],
        "acceptance": {"overall": [1.25]},
    }
    text = " ".join(str(model_card(config(provenance={"evaluation": evaluation}))).split())
    assert "Not by hf-specdec; nothing is noted of it. ## Accuracy On 6 prompts" in text
    assert "0 positions" not in text
    assert "self-distillation" not in text
    text = str(model_card(config(provenance={"measured": {"about": "Measured.", "table": "| 1 |"}})))
    assert "## Accuracy" not in text
    assert "nothing is noted of it.\n\n## Speed\n\nMeasured." in text


def test_the_card_holds_a_note() -> None:
    assert "on a machine, 2 threads. On a quantised base.\n\n```text" in str(
        model_card(config(provenance={**PROVENANCE, "note": "On a quantised base."}))
    )


def test_figures_of_another_mode_are_refused() -> None:
    report = {"summaries": [{"task": "qa", "case": "medusa", "mean_acceptance_length": 1.5, "ratio": 1.2}]}
    with pytest.raises(ValueError, match="mine has no figures about mode early_exit"):
        measured_by([report], ["mine"], "early_exit")


def test_the_command_line_leaves_a_card_that_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tmp_path / "heads"
    with_heads().save_pretrained(heads, save_embedding_layers=False)
    (heads / "README.md").write_text("My own words.\n")
    summary = {"task": "qa", "case": "medusa", "mean_acceptance_length": 1.5, "ratio": 1.2}
    environment = {"dtype": "float32", "device": "cpu", "threads": 2, "torch": "2.13.0", "transformers": "5.24.0"}
    report = {"summaries": [summary], "settings": {"max_new_tokens": 128}, "environment": environment}
    (tmp_path / "mine.json").write_text(json.dumps(report))
    assert main(["card", str(heads), "--bench", str(tmp_path / "mine.json")]) == 0
    assert (heads / "README.md").read_text() == "My own words.\n"
    assert "stays as it is" in capsys.readouterr().out
    assert "1.50 (1.20x)" in PeftConfig.from_pretrained(str(heads)).provenance["measured"]["table"]


def test_the_command_line_takes_figures_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tmp_path / "heads"
    with_heads().save_pretrained(heads, save_embedding_layers=False)
    for nodes, length, dtype in ((7, 1.5, "float32"), (15, 1.75, "bfloat16")):
        summaries = [
            {"task": "qa", "case": "plain", "mean_acceptance_length": None, "ratio": 1.0},
            {"task": "qa", "case": "medusa", "mean_acceptance_length": length, "ratio": length - 0.3},
        ]
        report = {
            "summaries": summaries,
            "settings": {"max_new_tokens": 128},
            "environment": {
                "dtype": dtype,
                "device": "cpu",
                "threads": 2,
                "torch": "2.13.0",
                "transformers": "5.24.0",
            },
        }
        (tmp_path / f"{nodes}.json").write_text(json.dumps(report))
    files = [str(tmp_path / "7.json"), str(tmp_path / "15.json")]
    assert main(["card", str(heads), "--bench", *files, "--columns", "7 nodes", "15 nodes", "--repo", "me/heads"]) == 0
    text = (heads / "README.md").read_text()
    assert "| task | 7 nodes | 15 nodes |" in text
    assert "| qa | 1.50 (1.20x) | 1.75 (1.45x) |" in text
    assert "128 new tokens: float32 and bfloat16, cpu, 2 threads" in text
    assert "Not measured" not in text
    assert PeftConfig.from_pretrained(str(heads)).provenance["measured"]["table"] in text
    assert main(["card", str(heads), "--bench", *files, "--columns", "one"]) == 2
    (tmp_path / "other.json").write_text("{}")
    assert main(["card", str(heads), "--bench", str(tmp_path / "other.json")]) == 2
    assert "no report" in capsys.readouterr().err
