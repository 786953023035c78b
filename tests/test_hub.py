"""Push and pull with the real Hub client against a Hub of our own; every client is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_hub import TOKEN, FakeHub

_COMMON = """
import json, sys, torch
import hf_specdec
from hf_specdec.heads import MedusaConfig, find_heads
from hf_specdec.testing import tiny_model
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
sys.path.insert(0, sys.argv[1])
from conftest import prompt, run

def described(model):
    weights = {key: tensor.double().sum().item() for key, tensor in find_heads(model).weights.state_dict().items()}
    with hf_specdec.record() as stats:
        run(model, prompt(2, padding=2), max_new_tokens=16, speculative_mode="medusa",
            speculative_config={"num_draft_tokens": 6})
    rows = [[row.drafted, row.accepted, row.tokens] for row in stats.rows]
    return {"weights": weights, "bytes": digest(model), "rows": rows}

def digest(model):
    import hashlib
    found = hashlib.sha256()
    for key, tensor in sorted(find_heads(model).weights.state_dict().items()):
        found.update(key.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
"""

_PUSH = """
from adapters import scramble
tiny_model("llama").save_pretrained(sys.argv[2])
base = tiny_model("llama")
model = get_peft_model(base, MedusaConfig(num_heads=3, head_type="sequential", draft_vocab_size=60))
scramble(base, "default", seed=1)
first = model.push_to_hub("me/heads").oid
expected = described(base)
scramble(base, "default", seed=2)
model.push_to_hub("me/heads")
model.push_to_hub("me/secret", private=True)
print(json.dumps({"first": first, "at_first": expected, "latest": described(base)}))
"""

_PULL = """
ways = {
    "load_adapter": lambda model, **where: model.load_adapter("me/heads", adapter_kwargs=where) and None or model,
    "PeftModel": lambda model, **where: PeftModel.from_pretrained(model, "me/heads", **where).get_base_model(),
}
print(json.dumps({
    f"{way}, {name}": described(load(tiny_model("llama"), **where))
    for way, load in ways.items()
    for name, where in {"latest": {}, "at_first": {"revision": sys.argv[2]}}.items()
}))
"""

_FAIL = """
ways = {
    "load_adapter": lambda model, name, **where: model.load_adapter(name, adapter_kwargs=where),
    "PeftModel": lambda model, name, **where: PeftModel.from_pretrained(model, name, **where),
}
found = {}
for way, load in ways.items():
    for case, (name, where) in json.loads(sys.argv[2]).items():
        model = tiny_model("llama")
        attributes, keys = set(vars(model)), set(model.state_dict())
        try:
            load(model, name, **where)
            found[f"{way}, {case}"] = "loaded"
        except Exception as error:
            said = []
            while error is not None:  # PEFT gives the Hub's own error as the cause
                said.append(f"{type(error).__name__}: {error}")
                error = error.__cause__ or error.__context__
            found[f"{way}, {case}"] = " <- ".join(said)
            assert set(vars(model)) == attributes and set(model.state_dict()) == keys, (way, case)
print(json.dumps(found))
"""


_EXAMPLE = """
import runpy
from adapters import scramble
tiny_model("llama").save_pretrained(sys.argv[3])
base = tiny_model("llama")
model = get_peft_model(base, MedusaConfig(num_heads=2))
scramble(base, "default", seed=4)
model.save_pretrained(sys.argv[4])
path = sys.argv[2]
sys.argv = [path, "--model", sys.argv[3], "--heads", sys.argv[4], "--repo", "me/example", "--private"]
from contextlib import redirect_stdout
import io
said = io.StringIO()
with redirect_stdout(said):
    runpy.run_path(path, run_name="__main__")
print(json.dumps(said.getvalue()))
"""


def client(hub: FakeHub, home: Path, script: str, *arguments: str, token: str | None = TOKEN) -> Any:
    """What a script prints last, run by a new process that knows this Hub only."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("HF_TOKEN", None)
    if token is not None:
        environment["HF_TOKEN"] = token
    code = f"import os; os.environ['HF_HUB_OFFLINE'] = '0'\n{_COMMON}{script}"
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, folder, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


_CARDS = """
from test_card import PROVENANCE
from adapters import scramble
base = tiny_model("llama")
provenance = {**PROVENANCE, "positions": int(sys.argv[2])}
model = get_peft_model(base, MedusaConfig(num_heads=2, provenance=provenance), adapter_name=sys.argv[3])
scramble(base, sys.argv[3], seed=1)
model.push_to_hub("me/carded" if sys.argv[3] == "default" else "me/named", tags=sys.argv[4:])
if sys.argv[3] != "default":  # as its card says
    base = tiny_model("llama")
    base.load_adapter("me/named", adapter_kwargs={"subfolder": sys.argv[3]})
    find_heads(base)
print(json.dumps(""))
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with FakeHub() as hub:
        home = tmp_path_factory.mktemp("pusher")
        yield hub, client(hub, home, _PUSH, str(home / "base"))


def test_a_fresh_process_pulls_what_was_pushed(pushed: Any, tmp_path: Path) -> None:
    hub, expected = pushed
    assert expected["first"] in [commit.sha for commit in hub.repositories["me/heads"].commits]
    files = set(hub.repositories["me/heads"].commits[-1].files)
    assert files == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    pulled = client(hub, tmp_path, _PULL, expected["first"])
    assert expected["at_first"]["bytes"] != expected["latest"]["bytes"]
    for way in ("load_adapter", "PeftModel"):
        assert pulled[f"{way}, latest"] == expected["latest"]
        assert pulled[f"{way}, at_first"] == expected["at_first"]


def test_the_card_is_pushed(pushed: Any, tmp_path: Path) -> None:
    """`push_to_hub` would put one of its own, or the Hub's, over what was saved."""
    hub, _ = pushed

    def card() -> str:
        return " ".join(hub.repositories["me/carded"].commits[-1].files["README.md"].decode().split())

    client(hub, tmp_path / "home", _CARDS, "123456", "default", "of-my-own")
    assert "123,456 positions from prompts.jsonl" in card()
    assert 'model.load_adapter("me/carded")' in card()
    assert "of-my-own" in card()
    client(hub, tmp_path / "home", _CARDS, "654321", "default")
    assert "654,321 positions from prompts.jsonl" in card()
    assert "of-my-own" in card()
    files = hub.repositories["me/carded"].commits[-1].files
    hub.put("me/carded", {**files, "README.md": b"---\nlicense: mit\n---\nMy own words.\n"})
    client(hub, tmp_path / "home", _CARDS, "123456", "default")
    assert "My own words." in card()
    assert "positions" not in card()
    client(hub, tmp_path / "home", _CARDS, "123456", "small")
    named = hub.repositories["me/named"].commits[-1].files["README.md"].decode()
    assert "123,456 positions" in named
    assert 'load_adapter("me/named", adapter_kwargs={"subfolder": "small"})' in named


def test_what_cannot_be_pulled_says_why(pushed: Any, tmp_path: Path) -> None:
    hub, _ = pushed
    good = hub.repositories["me/heads"].commits[-1].files
    weights = good["adapter_model.safetensors"]
    hub.put("me/corrupted", {**good, "adapter_model.safetensors": b"\xff" * len(weights)})
    hub.put("me/truncated", {**good, "adapter_model.safetensors": weights[: len(weights) // 2]})
    hub.put("me/empty", {"README.md": b"nothing here"})
    cases = {
        "private": ("me/secret", {}),
        "missing": ("me/nothing", {}),
        "no such revision": ("me/heads", {"revision": "0" * 40}),
        "corrupted": ("me/corrupted", {}),
        "truncated": ("me/truncated", {}),
        "no adapter": ("me/empty", {}),
    }
    found = client(hub, tmp_path, _FAIL, json.dumps(cases), token=None)
    for way in ("load_adapter", "PeftModel"):
        for case, said in (
            ("private", "me/secret"),
            ("missing", "me/nothing"),
            ("no such revision", "0" * 40),
            ("corrupted", "could not be loaded"),
            ("truncated", "could not be loaded"),
            ("no adapter", "me/empty"),
        ):
            assert said in found[f"{way}, {case}"], found[f"{way}, {case}"]
    assert client(hub, tmp_path, _FAIL, json.dumps({"private": ("me/secret", {})})) == {
        "load_adapter, private": "loaded",
        "PeftModel, private": "loaded",
    }


def test_the_example_pushes_and_pulls(pushed: Any, tmp_path: Path) -> None:
    hub, _ = pushed
    example = Path(__file__).parent.parent / "examples" / "push_and_pull.py"
    said = client(hub, tmp_path / "home", _EXAMPLE, str(example), str(tmp_path / "base"), str(tmp_path / "heads"))
    assert "pushed: http" in said
    assert "pulled: identical: yes" in said
    assert hub.repositories["me/example"].private
