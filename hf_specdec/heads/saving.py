"""Model cards for adapters of draft heads that are saved or pushed (see `install.WRAPPED`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from peft import PeftConfig

from ..host.hub import adapter_configs
from ..host.peft import is_head_config
from .card import MARK, save_card
from .loading import describes_heads


def save_with_card(original: Callable, peft_model: Any, output_dir: str) -> None:
    """In place of `PeftModel.create_or_update_model_card`, which makes a card without content where there is none."""
    path = Path(output_dir) / "README.md"
    before = path.read_bytes() if path.exists() else None
    original(peft_model, output_dir)
    config = peft_model.active_peft_config
    if is_head_config(config) and config.provenance:
        if before is not None and MARK.encode() in before:
            path.write_bytes(before)  # with the tags that PEFT has taken out
        _save_card(config, path, replace=before is None)


def upload_with_card(original: Callable, mixin: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    """In place of what `push_to_hub` ends in: it replaces the card that was saved by the Hub's, or an empty one."""
    folder = Path(working_dir)
    for file in adapter_configs(folder):
        config: Any = PeftConfig.from_pretrained(str(file.parent)) if describes_heads(file) else None
        if config is not None and config.provenance:
            subfolder = None if file.parent == folder else file.parent.name
            _save_card(config, folder / "README.md", repo_id, subfolder)
            break
    return original(mixin, working_dir, repo_id, *args, **kwargs)


def _save_card(config: Any, path: Path, *repo: str | None, replace: bool = False) -> None:
    try:
        save_card(config, path, *repo, replace=replace)
    except (TypeError, ValueError, AttributeError, LookupError, TemplateError) as error:
        warnings.warn(f"The provenance of these heads makes no model card: {error!r}", stacklevel=4)
