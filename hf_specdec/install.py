"""What `import hf_specdec` changes in transformers and PEFT: the methods in `WRAPPED`, and nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import generation
from .host import hub, wrapping


@dataclass(frozen=True)
class Wrapped:
    """A method of the host that is wrapped once its module is imported."""

    module: str
    owner: str
    method: str
    wrapper: wrapping.Wrapper
    why: str

    def find_owner(self) -> type:
        """The class; its module has been imported."""
        return getattr(sys.modules[self.module], self.owner)

    def wrap(self) -> None:
        """Put the wrapper on, where it is not on already."""
        wrapping.wrap(self.find_owner(), self.method, self.wrapper)


def _load_by_transformers(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    from .heads.loading import load_by_transformers

    return load_by_transformers(original, model, args, kwargs)


def _load_by_peft(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    from .heads.loading import load_by_peft

    return load_by_peft(original, model, *args, **kwargs)


def _make_by_peft(original: Callable, cls: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    from .heads.loading import make_by_peft

    return make_by_peft(original, cls, *args, **kwargs)


def _save_card(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    from .heads.saving import save_with_card

    return save_with_card(original, model, *args, **kwargs)


def _upload_card(original: Callable, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    folder = args[0] if args else kwargs.get("working_dir")
    if folder is not None and hub.adapter_configs(folder):
        from .heads.saving import upload_with_card

        return upload_with_card(original, model, *args, **kwargs)
    return original(model, *args, **kwargs)


_PEFT = "peft"
WRAPPED: tuple[Wrapped, ...] = (
    Wrapped(
        "transformers.generation.utils",
        "GenerationMixin",
        "generate",
        generation.generate,
        "takes speculative_mode=; without a mode the original runs with the arguments as they came",
    ),
    Wrapped(
        "transformers.integrations.peft",
        "PeftAdapterMixin",
        "load_adapter",
        _load_by_transformers,
        "transformers loads leniently, so draft heads are checked, and taken out again where they fail",
    ),
    Wrapped(
        "transformers.utils.hub",
        "PushToHubMixin",
        hub.UPLOAD,
        _upload_card,
        "push_to_hub replaces the model card of draft heads by one without content",
    ),
    Wrapped(_PEFT, "PeftModel", "load_adapter", _load_by_peft, "as transformers' load_adapter"),
    Wrapped(_PEFT, "PeftModel", "from_pretrained", _make_by_peft, "as transformers' load_adapter"),
    Wrapped(
        _PEFT,
        "PeftModel",
        "create_or_update_model_card",
        _save_card,
        "save_pretrained makes a model card without content",
    ),
)


def install() -> None:
    """Make `speculative_mode=` work on every `generate` of transformers, and draft heads known to PEFT.

    Done by `import hf_specdec`; idempotent. PEFT itself is not imported: what concerns it is done once it is.
    """
    wrapping.forget_imports()  # what is still waited for is waited for once
    for row in WRAPPED:
        wrapping.once_imported(row.module, row.wrap)
    # adapters of draft heads are read by `PeftConfig.from_pretrained` and others without a call of ours
    wrapping.once_imported(_PEFT, lambda: importlib.import_module(".heads", __package__))


def uninstall() -> None:
    """Undo `install`: every wrapper is taken off, and no import is waited for any more.

    PEFT goes on knowing the adapter types of draft heads that it has learned of: a model that has heads could not be
    saved otherwise. Where somebody else has wrapped one of the methods since, our wrapper stays below theirs and passes
    calls on.
    """
    wrapping.forget_imports()
    for row in WRAPPED:
        if row.module in sys.modules:
            wrapping.unwrap(row.find_owner(), row.method)
