"""What the site shows differently from the repository: the README as its start page, and links out of `docs`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs with the text of every page."""
    shown = Path(page.file.abs_src_path)
    source = shown
    if page.file.src_uri == "index.md":
        source = ROOT / "README.md"
        markdown = source.read_text(encoding="utf-8")

    def target(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:", link):
            return match[0]  # another site
        path = (source.parent / link).resolve()
        if path.is_relative_to(DOCS):
            return f"]({Path(os.path.relpath(path, shown.parent)).as_posix()}{anchor})"
        kind = "tree" if path.is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}{anchor})"

    # every second part is code, in which nothing is a link
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(target, part) for part in parts[::2]]
    return "".join(parts)
