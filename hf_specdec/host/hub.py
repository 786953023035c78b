"""What transformers uses to fetch from the Hub and to push to it, under names that are not public."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers.utils import find_adapter_config_file
from transformers.utils.hub import DownloadKwargs

# the method of `PushToHubMixin` that every `push_to_hub` ends in, after files have been saved to a folder
UPLOAD = "_upload_modified_files"
ADAPTER_CONFIG = "adapter_config.json"


def adapter_configs(folder: str | Path) -> list[Path]:
    """The configs of the adapters in a folder; those not called "default" are saved in folders of their names."""
    folder = Path(folder)
    return [file for file in (folder / ADAPTER_CONFIG, *sorted(folder.glob(f"*/{ADAPTER_CONFIG}"))) if file.is_file()]


def find_adapter_config(source: str, download: dict[str, Any]) -> str | None:
    """Where the config of an adapter is on this machine, fetched from the Hub if need be. None: there is none."""
    known = inspect.signature(find_adapter_config_file).parameters
    return find_adapter_config_file(source, **{name: value for name, value in download.items() if name in known})


def download_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of some keyword arguments that say how to fetch files."""
    return {name: value for name, value in arguments.items() if name in DownloadKwargs.__annotations__}
