"""The model card of an adapter, made from what was noted down when it was trained and measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import HeadConfig
from .kind import HeadKind, kind_of

# in every card that is made here; without it a card is somebody's own, and stays
MARK = "<!-- Made by hf_specdec from adapter_config.json. Remove this line, and the card is left as it is. -->"
# PEFT and transformers make cards of the Hub's template, in which all is still to be filled in, or all but this
_BLANK, _AUTOMATIC = "[More Information Needed]", "This model card has been automatically generated."
TEMPLATE = Path(__file__).with_name("model_card.md")
# what a training notes down (`training.TrainingReport`) and what is added later, and what stands for it where it is not
_NOTED: dict[str, Any] = {
    "positions": 0,
    "held_out_positions": 0,
    "data": [],
    "data_settings": {},
    "data_seconds": 0.0,
    "training_seconds": 0.0,
    "machine": "an unknown machine",
    "command": None,
    "note": None,
    "versions": {},
    "heads": [],
    "evaluation": None,
    "measured": None,
}


def model_card(config: HeadConfig, repo_id: str | None = None, subfolder: str | None = None) -> Any:
    """The card (`huggingface_hub.ModelCard`) of heads whose `provenance` says how they came to be.

    Args:
        config: of the heads.
        repo_id: the repository that the card's example loads from.
        subfolder: where in it the heads are.
    """
    from huggingface_hub import ModelCard, ModelCardData

    kind, text = kind_of(config), kind_of(config).card(config)
    provenance: dict[str, Any] = dict(config.provenance or {})
    base = config.base_model_name_or_path or "the base model"
    data = ModelCardData(
        base_model=config.base_model_name_or_path,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["hf-specdec", "speculative-decoding", *text.tags],
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        text=text,
        mode=kind.mode,
        base_model=base,
        base_name=base.rpartition("/")[2],
        base_revision=config.revision,
        repo_id=repo_id,
        subfolder=subfolder,
        draft_vocab_size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        output=_output(config),
        mark=MARK,
        minutes=_minutes,
        head_rows=lambda heads: _head_rows(kind, heads),
        evaluation_tables=lambda evaluation: evaluation_tables(kind, evaluation),
        **{name: provenance.get(name, otherwise) for name, otherwise in _NOTED.items()},
    )


def _output(config: HeadConfig) -> str:
    if config.output_rank is not None:
        return f"an output layer of rank {config.output_rank}"
    return "output layers of their own" if config.has_own_outputs else "the output layer is the base model's"


def _head_rows(kind: HeadKind, heads: list[dict[str, float]]) -> str:
    """Accuracy of every head, as rows of a table. Heads count from 1."""
    return "".join(
        f"| {number} | {kind.first_ahead + number - 1} ahead | {head['top1']:.3f} | {head['top10']:.3f} "
        f"| {head['loss']:.2f} |\n"
        for number, head in enumerate(heads, start=1)
    )


def save_card(
    config: HeadConfig,
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
    from huggingface_hub import ModelCard, metadata_load
    from yaml import YAMLError

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
        # (as they were written: older versions of the client read a single tag letter by letter)
        tags = (metadata_load(path) or {}).get("tags") or []
        tags = tags if isinstance(tags, list) else [tags]
        card.data["tags"] = list(dict.fromkeys([*card.data["tags"], *tags]))
    card.save(path)
    return True


def _is_blank(card: Any) -> bool:
    """Whether nobody has written into a card more than its metadata."""
    from huggingface_hub import ModelCard, ModelCardData

    template = ModelCard.from_template(ModelCardData()).content.count(_BLANK)
    return not card.text.strip() or card.content.count(_BLANK) + card.content.count(_AUTOMATIC) >= template


def evaluation_tables(kind: HeadKind, evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """What was counted per task, as a card shows it: titles and tables.

    Args:
        kind: of the heads.
        evaluation: a `training.Evaluation` as saved.
    """
    sizes = tuple(f"{nodes} nodes" for nodes in evaluation.get("nodes", ()))
    return [
        (table.title, _table(evaluation[table.name], table.columns or sizes))
        for table in kind.tables
        if table.name in evaluation
    ]


def _table(per_task: dict[str, list[float]], names: Sequence[str]) -> str:
    rows = [f"| task | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    # JSON does not keep an order here: tasks by name, and what they come to last
    for task, values in sorted(per_task.items(), key=lambda item: (item[0] == "overall", item[0])):
        rows.append(f"| {task} | {' | '.join(f'{value:.2f}' for value in values)} |")
    return "\n".join(rows)


def measured_by(reports: list[dict[str, Any]], names: list[str], mode: str) -> dict[str, str]:
    """What `hf-specdec bench --json` found about a mode, as a card shows it.

    Args:
        reports: such JSON files, read.
        names: what to call each, for instance `"15 nodes"`.
        mode: the mode that drafts with these heads.

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
        f"Mean acceptance length (tokens per forward of the base model, plain decoding is 1.00), and speed relative to "
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
