"""Prompts to measure on."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ConfigurationError
from .report import Prompt


def read_prompts(path: Path, per_task: int | None = None) -> list[Prompt]:
    """Prompts from a JSON Lines file: each line has `prompt`, or `turns` whose first is used, and perhaps `task`.

    Args:
        path: the file.
        per_task: most prompts of a task; None takes all.

    Raises:
        ConfigurationError: the file cannot be read, holds no prompt, or a line of it is not as described.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read the prompts: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str) or not text:
            raise ConfigurationError(f'{path}:{number}: expected a JSON object with "prompt" or "turns".')
        prompts.append(Prompt(text, str(entry.get("task", Prompt.task))))
    if per_task is not None:
        by_task: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_task.setdefault(prompt.task, []).append(prompt)
        prompts = [prompt for group in by_task.values() for prompt in group[:per_task]]
    if not prompts:
        raise ConfigurationError(f"{path} holds no prompts.")
    return prompts
