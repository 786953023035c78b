"""The newcomer's path: every Python block of the pages and every example is run, and what the pages point at exists."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from conftest import letter_tokenizer
from transformers import pipeline

import hf_specdec
from hf_specdec import modes
from hf_specdec.testing import tiny_model

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *SITE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "model_cards").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Pages and examples register modes; other tests must not see them."""
    before = set(hf_specdec.mode_names())
    try:
        yield
    finally:
        for name in set(hf_specdec.mode_names()) - before:
            hf_specdec.unregister_mode(name)
        hf_specdec.install()


def blocks(path: Path) -> list[tuple[str, int, str]]:
    """(language, number of the line that opens it, content) of every fenced block."""
    found: list[tuple[str, int, str]] = []
    opened: tuple[str, int] | None = None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = (line.removeprefix("```").strip(), number)
        else:
            assert line.strip() == "```", f"{named(path)}:{number}: a block within a block"
            found.append((*opened, "\n".join(lines[opened[1] : number - 1])))
            opened = None
    assert opened is None, f"{named(path)}: the block opened in line {opened[1] if opened else 0} has no end"
    return found


def prose(path: Path) -> list[str]:
    """The lines of the page outside of its blocks."""
    lines, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


def anchors(path: Path) -> set[str]:
    """What links may point at within the page."""
    headings = [line.lstrip("#") for line in prose(path) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def endless(**settings: Any) -> Any:
    """A tiny model without an EOS token, since random texts might end at their first token."""
    model = tiny_model("llama", **settings)
    model.generation_config.eos_token_id = None
    return model


def tokenizer_of_the_pages() -> Any:
    tokenizer = letter_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def names_of_the_pages() -> dict[str, Any]:
    """What the blocks of a page may use, as the guide introduces it."""
    model, draft, tokenizer = endless(), endless(num_hidden_layers=2), tokenizer_of_the_pages()
    prompts = ["abcabcabcabc", "hello-hello-hel", "xyz"]
    return {
        "__name__": "page",
        "model": model,
        "draft": draft,
        "tokenizer": tokenizer,
        "prompts": prompts,
        "inputs": tokenizer(prompts[0], return_tensors="pt"),
        "pipe": pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu"),
    }


@pytest.mark.parametrize("path", SITE, ids=named)
@pytest.mark.filterwarnings("ignore:Decoding plainly, without speculation:UserWarning")
@pytest.mark.filterwarnings("ignore:You seem to be using the pipelines sequentially")
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share their names, in order, as a reader would type them."""
    monkeypatch.chdir(tmp_path)  # some blocks save a model
    namespace = names_of_the_pages()
    for language, line, code in blocks(path):
        if language == "python":
            # blank lines in front make a traceback name the page's own line
            exec(compile("\n" * line + code, str(path), "exec", dont_inherit=True), namespace)


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_program_of_the_readme_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A folder with the name of its model stands in for the Hub's, nothing else."""
    (program,) = [code for language, _, code in blocks(README) if language == "python"]
    assert len([line for line in program.splitlines() if line]) <= 11
    folder = tmp_path / re.findall(r'^name = "([\w./-]+)"$', program, re.MULTILINE)[0]
    model, tokenizer = endless(), tokenizer_of_the_pages()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, str(README), "exec", dont_inherit=True), namespace)
    plain = model.generate(**namespace["inputs"], max_new_tokens=64)
    assert namespace["output"].tolist() == plain.tolist()
    end = re.escape(repr(tokenizer.decode(plain[0, -10:])))
    printed = capsys.readouterr().out.splitlines()
    assert [re.fullmatch(rf"(\w+): \d+\.\d\d s, {end}", line)[1] for line in printed] == ["none", "prompt_lookup"] * 2


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_block_says_what_it_is(path: Path) -> None:
    """So that no Python block escapes being run."""
    assert {language for language, _, _ in blocks(path)} <= {"python", "bash", "text"}


def test_the_pages_with_the_most_to_show_have_blocks() -> None:
    for page in ("guide", "choosing-a-mode", "draft-heads", "extending", "measuring", "analysis"):
        page = f"docs/{page}.md"
        assert any(language == "python" for language, _, _ in blocks(ROOT / page)), page


# ---------------------------------------------------------------- examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


def run_example(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """What the example prints when it is started as a program."""
    monkeypatch.setattr(sys, "argv", [str(path), "--model", str(folder)])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


RESULT = re.compile(r"^(\w+): identical: (yes|no), mean acceptance length: (\d+\.\d\d)$", re.MULTILINE)
EXPECTED = {
    "generate.py": ["greedy", "sampled"],
    "in_a_pipeline.py": ["pipeline"],
    "own_drafter.py": ["bigram"],
    "train_heads.py": ["medusa"],
}
ELSEWHERE = {"push_and_pull.py"}  # needs a Hub: see test_hub.py


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES} == EXPECTED.keys() | ELSEWHERE


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name in EXPECTED], ids=named)
@pytest.mark.filterwarnings("ignore:You seem to be using the pipelines sequentially")
def test_examples(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with hf_specdec.record() as stats:
        printed = run_example(path, folder, monkeypatch, capsys)
    results = RESULT.findall(printed)
    assert [name for name, _, _ in results] == EXPECTED[path.name], printed
    assert all(identical == "yes" for _, identical, _ in results), printed
    assert all(float(length) >= 1.0 for _, _, length in results), printed
    assert stats.calls >= len(EXPECTED[path.name]), "the example was meant to speculate"


def test_the_drafter_of_the_example_is_registered_as_a_mode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with hf_specdec.record() as stats:
        run_example(ROOT / "examples" / "own_drafter.py", folder, monkeypatch, capsys)
    assert stats.mode == "bigram"
    assert "bigram" in hf_specdec.mode_names()


# ---------------------------------------------------------------- what the pages point at


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_relative_links_lead_somewhere(path: Path) -> None:
    without_code = re.sub(r"`[^`]*`", "", "\n".join(prose(path)))
    links = re.findall(r"\]\(([^)\s]+)\)", without_code)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue  # another site
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{named(path)} links to {link}"
        assert file.is_relative_to(ROOT), f"{named(path)} links out of the project: {link}"
        if anchor:
            assert anchor in anchors(file), f"{named(path)} links to {link}"


def test_the_two_commands_of_the_readme_exist() -> None:
    commands = [code for language, _, code in blocks(README) if language == "bash"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command, target in (("make demo", "demo"), ("make test", "test")):
        assert command in commands, f"the README shows `{command}` alone in a block"
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named_targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
    assert named_targets
    for target in named_targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page} names `make {target}`"


def test_the_readme_names_every_mode() -> None:
    text = README.read_text(encoding="utf-8")
    for mode in hf_specdec.mode_names():
        assert f"| `{mode}` |" in text, f"the table of modes lacks {mode}"


def test_every_setting_is_explained() -> None:
    text = (ROOT / "docs" / "choosing-a-mode.md").read_text(encoding="utf-8")
    for mode in hf_specdec.mode_names():
        for field in dataclasses.fields(modes.get_mode(mode).config):
            shown = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
            assert re.search(rf"^\| `{field.name}` \| `?{re.escape(shown)}`? \|", text, re.MULTILINE), field.name


def test_every_acceptance_rule_is_explained() -> None:
    text = (ROOT / "docs" / "choosing-a-mode.md").read_text(encoding="utf-8")
    for rule in hf_specdec.rule_names():
        assert f"| `{rule}`" in text, f"the table of rules lacks {rule}"


def pages_of(entry: Any) -> list[str]:
    """The pages below an entry of the site's navigation."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for part in below for page in pages_of(part)]


def test_the_navigation_of_the_site_lists_every_page_once() -> None:
    site = yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages_of(site["nav"])) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in SITE)


def test_the_api_pages_show_every_public_name() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    found = [pkgutil.resolve_name(name) for name in shown]  # raises where there is none
    modules = [module for module in found if isinstance(module, ModuleType)]
    with_modules = {name for module in modules for name in getattr(module, "__all__", vars(module))}
    for name in hf_specdec.__all__:
        assert name == "__version__" or f"hf_specdec.{name}" in shown or name in with_modules, name


def test_every_topic_of_make_quick_has_its_tests() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (topics,) = re.findall(r"^QUICK = (.+)$", makefile, re.MULTILINE)
    for topic in topics.split():
        assert [*(ROOT / "tests").glob(f"test_{topic}.py"), *(ROOT / "tests").glob(f"test_{topic}_*.py")], topic


def test_the_changelog_has_this_version() -> None:
    assert f"## [{hf_specdec.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
