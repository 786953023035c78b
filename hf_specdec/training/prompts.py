"""Prompts to train on: read from the usual formats, and as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import TrainingDataError

# columns that prompts are looked for in, in this order
_COLUMNS = ("messages", "conversations", "prompt", "turns", "question", "instruction", "text")


def read_chats(source: str | Path) -> list[list[dict[str, str]]]:
    """Prompts as chats without the last answer, from a JSON Lines file, a `datasets` folder, or a data set's id.

    A row holds a chat (`messages`, or `conversations` with `from` and `value`), or a prompt (`prompt`, the first of
    `turns`, `question`, `instruction` with perhaps `input`, or `text`).

    Raises:
        TrainingDataError: the source cannot be read, or a row holds none of these.
    """
    rows = _rows(source)
    chats = [_chat(row, f"row {number} of {source}") for number, row in enumerate(rows, start=1)]
    if not chats:
        raise TrainingDataError(f"{source} holds no prompts.")
    return chats


def _rows(source: str | Path) -> list[dict[str, Any]]:
    path = Path(source)
    if path.is_file():
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise TrainingDataError(f"{source} is not JSON Lines: {error}") from error
    try:
        import datasets
    except ImportError:
        raise TrainingDataError(
            f"{source} is no file. Data sets by id or folder need `pip install datasets`."
        ) from None
    try:
        loaded = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(str(source))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TrainingDataError(f"{source} cannot be read as a data set: {error}") from error
    if isinstance(loaded, dict):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return list(loaded)


def _chat(row: Any, where: str) -> list[dict[str, str]]:
    column = next((name for name in _COLUMNS if isinstance(row, dict) and row.get(name)), None)
    if column is None:
        raise TrainingDataError(f"{where} has no prompt: it needs one of {', '.join(_COLUMNS)}.")
    value = row[column]
    try:
        if column in ("messages", "conversations"):
            return _without_last_answer([_message(message) for message in value])
        text = value[0] if column == "turns" else value
        if column == "instruction" and row.get("input"):
            text = f"{text}\n\n{row['input']}"
    except (KeyError, TypeError, IndexError) as error:
        said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise TrainingDataError(f"{column} of {where} is malformed: {said}.") from error
    if not isinstance(text, str) or not text.strip():
        raise TrainingDataError(f"{column} of {where} holds no text.")
    return [{"role": "user", "content": text}]


def _message(message: dict[str, str]) -> dict[str, str]:
    role = message["role"] if "role" in message else message["from"]
    content = message["content"] if "content" in message else message["value"]
    if isinstance(content, list):  # parts, of which only text can be used
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError(f"a message without text: {message!r}")
    return {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}


def _without_last_answer(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    while chat and chat[-1]["role"] == "assistant":
        chat = chat[:-1]
    if not chat:
        raise TypeError("there is no message but the assistant's")
    return chat


def encode(tokenizer: Any, chats: Sequence[list[dict[str, str]]], most: int | None = None) -> list[list[int]]:
    """Token ids of the chats as prompts, in their order, without empty ones and those of more than `most` tokens."""
    if tokenizer.chat_template is not None:
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(["\n\n".join(message["content"] for message in chat) for chat in chats])["input_ids"]
    return [row for row in ids if row and (most is None or len(row) <= most)]


def opening(tokenizer: Any) -> list[int]:
    """Token ids of what a chat template puts before a user's first words.

    Raises:
        TrainingDataError: the tokenizer has no chat template, or one that hides them.
    """
    marker = "(the user's words)"
    if tokenizer.chat_template is None:
        raise TrainingDataError("Without a chat template a model cannot be asked for prompts. Leave own_prompts at 0.")
    whole = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    before, found, _ = whole.partition(marker)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not found or not ids:
        raise TrainingDataError("The chat template puts nothing before a user's words. Leave own_prompts at 0.")
    return ids
