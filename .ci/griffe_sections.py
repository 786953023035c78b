"""The sections of our docstrings as Griffe knows them."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object


class Sections(Extension):
    """Shows "Main arguments" as the table of parameters; "Other arguments" has a table of its own already."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Main arguments:\n", "Args:\n")
