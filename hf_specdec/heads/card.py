"""The model card of an adapter, made from what was noted down when it was trained and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from .config import MedusaConfig

# in every card that is made here; without it a card is somebody's own, and stays
MARK = "<!-- Made by hf_specdec from adapter_config.json. Remove this line, and the card is left as it is. -->"
# PEFT and transformers make cards of the Hub's template, in which all is still to be filled in, or all but this
_BLANK, _AUTOMATIC = "[More Information Needed]", "This model card has been automatically generated."
_TAGS = {"independent": ["medusa"], "sequential": ["medusa", "hydra"], "exit": ["early-exit", "kangaroo"]}
TEMPLATE = Path(__file__).with_name("model_card.md")


def model_card(config: MedusaConfig, repo_id: str | None = None, subfolder: str | None = None) -> ModelCard:
    """The card of heads whose `provenance` says how they came to be (see `training.TrainingReport`)."""
    provenance: dict[str, Any] = dict(config.provenance or {})
    base = config.base_model_name_or_path or "the base model"
    kind = config.head_type.capitalize()
    title = "A trained early exit" if config.head_type == "exit" else f"{kind} draft heads"
    data = ModelCardData(
        base_model=config.base_model_name_or_path,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["hf-specdec", "speculative-decoding", *_TAGS[config.head_type]],
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=f"{title} for {base.rpartition('/')[2]}",
        kind=kind,
        base_model=base,
        base_revision=config.revision,
        repo_id=repo_id,
        subfolder=subfolder,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        tied_heads=config.tied_heads,
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        own_lm_head=config.own_lm_head,
        output_rank=config.output_rank,
        head_type=config.head_type,
        exit_layer=config.exit_layer,
        mark=MARK,
        minutes=_minutes,
        **{
            name: provenance.get(name, default)
            for name, default in (
                ("positions", 0),
                ("held_out_positions", 0),
                ("data", []),
                ("data_settings", {}),
                ("data_seconds", 0.0),
                ("training_seconds", 0.0),
                ("machine", "an unknown machine"),
                ("command", None),
                ("note", None),
                ("versions", {}),
                ("heads", []),
                ("evaluation", None),
                ("measured", None),
            )
        },
        evaluation_tables=evaluation_tables,
    )


def save_card(
    config: MedusaConfig,
    path: Path,
    repo_id: str | None = None,
    subfolder: str | None = None,
    *,
    replace: bool = False,
) -> bool:
    """Write the card of heads, unless somebody wrote the one that is there. Returns whether it was written.

    Args:
        config: of the heads.
        path: of the card. Tags and other metadata of a card that is there are kept.
        repo_id: the repository that the card's example loads from.
        subfolder: where in it the heads are.
        replace: whether to write over any card.
    """
    card = model_card(config, repo_id, subfolder)
    if path.exists() and not replace:
        try:
            before = ModelCard.load(path)
        except (ValueError, YAMLError):  # not made here
            return False
        if MARK not in before.content and not _is_blank(before):
            return False
        for name, value in before.data.to_dict().items():
            if card.data.get(name) is None:
                card.data[name] = value
        tags = before.data.get("tags") or []
        tags = tags if isinstance(tags, list) else [tags]
        card.data["tags"] = list(dict.fromkeys([*card.data["tags"], *tags]))
    card.save(path)
    return True


def _is_blank(card: ModelCard) -> bool:
    """Whether nobody has written into a card more than its metadata."""
    template = ModelCard.from_template(ModelCardData()).content.count(_BLANK)
    return not card.text.strip() or card.content.count(_BLANK) + card.content.count(_AUTOMATIC) >= template


def evaluation_tables(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """What was counted per task, as a card shows it: titles and tables.

    Args:
        evaluation: a `training.evaluate.Evaluation` or `ExitEvaluation` as saved.
    """
    if "first_token" in evaluation:
        title = "Part of the tokens that are foreseen, which is the acceptance of a draft's first one"
        return [(title, _table(evaluation["first_token"], ["norm and LM head alone", "trained"]))]
    sizes = [f"{nodes} nodes" for nodes in evaluation["nodes"]]
    return [
        (title, _table(evaluation[name], sizes))
        for name, title in (
            (
                "acceptance",
                "Mean acceptance length of the heads alone, tokens a forward of the base model, with trees of so many "
                "drafted tokens",
            ),
            (
                "acceptance_with_lookup",
                "The same where candidates from earlier in the text share the trees, as they do in mode `medusa`",
            ),
        )
        if name in evaluation
    ]


def _table(per_task: dict[str, list[float]], names: list[str]) -> str:
    rows = [f"| task | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    # JSON does not keep an order here: tasks by name, and what they come to last
    for task, values in sorted(per_task.items(), key=lambda item: (item[0] == "overall", item[0])):
        rows.append(f"| {task} | {' | '.join(f'{value:.2f}' for value in values)} |")
    return "\n".join(rows)


def measured_by(reports: list[dict[str, Any]], names: list[str], mode: str = "medusa") -> dict[str, str]:
    """What `hf-specdec bench --json` found about a mode, as a card shows it.

    Args:
        reports: such JSON files, read.
        names: what to call each, for instance `"15 nodes"`.
        mode: `medusa`, or `early_exit` for trained exits.

    Raises:
        ValueError: a report has no figures about this mode.
    """
    rows: dict[str, list[str]] = {}
    for report, name in zip(reports, names, strict=True):
        found = {summary["task"]: summary for summary in report["summaries"] if summary["case"] == mode}
        if not found:
            raise ValueError(f"{name} has no figures about mode {mode}")
        for task, summary in found.items():
            rows.setdefault(task, []).append(f"{summary['mean_acceptance_length']:.2f} ({summary['ratio']:.2f}x)")
    environment, settings = reports[0]["environment"], reports[0]["settings"]
    dtypes = " and ".join(dict.fromkeys(report["environment"]["dtype"] for report in reports))
    about = (
        f"Mean acceptance length (tokens a forward of the base model, plain decoding is 1.00), and speed relative to "
        f"plain `generate()`, over {settings['max_new_tokens']} new tokens: {dtypes}, "
        f"{environment['device']}, {environment['threads']} threads, torch {environment['torch']}, transformers "
        f"{environment['transformers']}."
    )
    if environment["device"] == "cpu" and "float32" in dtypes:
        about += (
            " In float32 a part of the speed may not be drafting's: where it can, hf-specdec multiplies a few rows "
            "more quickly than PyTorch does."
        )
    table = [f"| task | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    table += [f"| {task} | {' | '.join(cells)} |" for task, cells in rows.items()]
    return {"about": about, "table": "\n".join(table)}


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
