"""The source against docs/architecture.md: who imports whom, in which order, and who uses the host's private names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import hf_specdec

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_specdec"
PAGE = ROOT / "docs" / "architecture.md"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60


def module_name(file: Path) -> str:
    """`target.slots` for hf_specdec/target/slots.py, `target` for its __init__.py, and "" for the package's."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[str]:
    """The package's modules that a file imports, wherever in it: in functions and for type checkers too."""
    package = list(file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "hf_specdec"]
            assert not names, f"{file.name} imports {names} absolutely"
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            inner = ".".join([*base, alias.name])
            yield inner if inner in MODULES else ".".join(base)


def arrows() -> set[tuple[str, str]]:
    """(importing module, imported module)."""
    return {(name, other) for name, file in MODULES.items() for other in imported(file) if other != name}


def circles(edges: set[tuple[str, str]]) -> list[str]:
    """The nodes that are left when those without a way on are taken away, one after the other."""
    left = {node for edge in edges for node in edge}
    while True:
        done = {node for node in left if not any(a == node and b in left for a, b in edges)}
        if not done:
            return sorted(left)
        left -= done


def folder(module: str) -> str:
    """The part of the package that a module belongs to: a folder, or a file at the root."""
    return module.split(".")[0]


def test_no_circle_between_files() -> None:
    edges = arrows()
    assert len(edges) > 200
    assert circles(edges) == []


def test_no_circle_between_folders() -> None:
    edges = {(folder(a), folder(b)) for a, b in arrows() if folder(a) != folder(b)}
    assert len(edges) > 70
    assert circles(edges) == []


def test_circles_are_found() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == ["a", "b", "c"]


def stated_order() -> list[set[str]]:
    """The levels of the page's block "bottom up", one line each."""
    block = re.search(r"```text\n(errors.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block, "docs/architecture.md states the order of imports in a block that begins with errors"
    return [set(re.findall(r"[\w.]+", line.partition("#")[0])) for line in block.group(1).splitlines() if line.strip()]


def test_imports_follow_the_order_of_the_page() -> None:
    """A part imports from the lines above its own; within a folder everything but a circle is allowed."""
    levels = stated_order()
    level_of = {name: number for number, names in enumerate(levels) for name in names}
    parts = {folder(name) for name in MODULES} - {""}
    assert level_of.keys() == parts, "the page's order names every part of the package, and nothing else"
    against = sorted(
        f"{a} -> {b}"
        for a, b in arrows()
        if a and folder(a) != folder(b) and not level_of[folder(b)] < level_of[folder(a)]
    )
    assert against == []


def test_the_page_names_every_file() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [name for name, file in MODULES.items() if file.name != "__init__.py" and f"`{file.name}`" not in text]
    assert missing == []


# ---------------------------------------------------------------- the host's private names


def private_names(file: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of private names that a file uses and does not define itself."""
    tree = parsed(file)
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stored = [node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))]
    own |= {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in stored
        if isinstance(node.ctx, ast.Store)
        and (isinstance(node, ast.Name) or (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")))
    }
    parts_of_texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [alias.name for alias in node.names] + (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts_of_texts:
            names = [node.value]
        for name in names:
            if re.fullmatch(r"_[a-zA-Z]\w*", name) and name not in own:
                yield node.lineno, name


@pytest.mark.parametrize("name", [name for name in MODULES if folder(name) != "host"])
def test_private_names_of_the_host_stay_in_its_folder(name: str) -> None:
    assert [f"line {line}: {used}" for line, used in private_names(MODULES[name])] == []


def test_private_names_are_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from torch._C import x\nfrom torch import _y\n\ndef f(model, _z):\n    self._own = 1\n    _z = model._own\n"
        '    model._a = getattr(model, "_b", None)\n    return model._c.d\n'
    )
    assert [name for _, name in private_names(file)] == ["_C", "_y", "_a", "_b", "_c"]


def test_no_private_method_of_the_host_is_overridden_elsewhere() -> None:
    found = []
    for name, file in MODULES.items():
        if folder(name) == "host" or file.name == "__main__.py":
            continue
        module = import_module(f"hf_specdec.{name}".rstrip("."))
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            for base in kind.__mro__[1:]:
                if base.__module__.startswith(("transformers", "peft", "huggingface_hub", "torch", "accelerate")):
                    private = {key for key in vars(kind).keys() & vars(base).keys() if re.match(r"_[a-z]", key)}
                    found += [f"{kind.__name__}.{key} of {base.__name__}" for key in private - {"_abc_impl"}]
    assert found == []


# ---------------------------------------------------------------- what the import changes


def test_the_page_lists_what_the_import_wraps() -> None:
    from hf_specdec.install import WRAPPED

    text = PAGE.read_text(encoding="utf-8")
    assert WRAPPED
    for wrapped in WRAPPED:
        assert f"`{wrapped.owner}.{wrapped.method}`" in text


def test_the_public_names_are_all_documented() -> None:
    for name in hf_specdec.__all__:
        value = getattr(hf_specdec, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


# ---------------------------------------------------------------- sizes

SIZED = [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("file", SIZED, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    for node in ast.walk(parsed(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= MOST_LINES_OF_A_FUNCTION, node.name
