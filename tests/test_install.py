"""What the import changes in transformers and PEFT: the methods of one table, once PEFT is there; all is undone."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import prompt
from peft import PeftModel, get_peft_model
from transformers import GenerationConfig, GenerationMixin

import hf_specdec
from hf_specdec.generation import speculative
from hf_specdec.heads import MedusaConfig, find_heads
from hf_specdec.host import wrapping
from hf_specdec.install import WRAPPED
from hf_specdec.testing import tiny_model

# the attributes that a class has itself, of every class of the host that is loaded, and the globals of its modules
_SNAPSHOT = """
import sys, inspect
def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("transformers", "peft", "huggingface_hub", "accelerate", "torch"):
            continue
        if module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                for attribute, method in list(vars(value).items()):
                    found[name, f"{key}.{attribute}"] = method
    return found
def changed(before, after):
    return {key for key in before if key not in after or after[key] is not before[key]}
def added(before, after):
    classes = {key for key, value in before.items() if inspect.isclass(value)}
    return {key for key in after if key not in before and (key[0], key[1].partition(".")[0]) in classes}
"""


def python(code: str, *arguments: str) -> str:
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a base model and of heads for it."""
    folder = tmp_path_factory.mktemp("adapter")
    tiny_model("llama").save_pretrained(folder / "base")
    get_peft_model(tiny_model("llama"), MedusaConfig(num_heads=2)).save_pretrained(folder / "heads")
    return folder / "base", folder / "heads"


# ---------------------------------------------------------------- PEFT only when needed


def test_the_import_loads_neither_peft_nor_our_heads() -> None:
    python(
        "import hf_specdec, sys\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] == 'peft' or 'hf_specdec.heads' in name]\n"
        "assert not loaded, loaded\n"
        "assert {'MedusaConfig', 'MedusaModel'} <= set(dir(hf_specdec)) & set(hf_specdec.__all__)\n"
        "assert hf_specdec.MedusaModel.prefix == 'medusa_'\n"
        "assert hf_specdec.MedusaConfig(num_heads=2).peft_type == 'MEDUSA'\n"
        "assert 'peft' in sys.modules\n"
    )


_LOAD = """
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file, save_file
import torch
base, heads = sys.argv[1:]
config = peft.PeftConfig.from_pretrained(heads)
assert type(config).__name__ == "MedusaConfig", config
model = AutoModelForCausalLM.from_pretrained(base)
peft.PeftModel.from_pretrained(model, heads)
model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, speculative_mode="medusa")
auto = peft.AutoPeftModelForCausalLM.from_pretrained(heads) if config.base_model_name_or_path else None
plain = AutoModelForCausalLM.from_pretrained(base)
plain.load_adapter(heads)
plain.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, speculative_mode="medusa")
import pathlib, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    bad = pathlib.Path(folder) / "bad"
    shutil.copytree(heads, bad)
    file = bad / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor * torch.nan for key, tensor in tensors.items()}, file)
    for load in (
        lambda model: peft.PeftModel.from_pretrained(model, bad), lambda model: model.load_adapter(str(bad))
    ):
        model = AutoModelForCausalLM.from_pretrained(base)
        try:
            load(model)
        except hf_specdec.errors.AdapterError as error:
            assert "not finite" in str(error)
        else:
            raise AssertionError("not checked")
        assert not hasattr(model, "peft_config")
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import peft\nimport hf_specdec",
        "import hf_specdec\nimport peft",
        "import hf_specdec\nfrom peft.config import PeftConfig\nimport peft",
        "from hf_specdec.heads import MedusaConfig\nimport peft, hf_specdec",
        "import hf_specdec.cli.app\nimport hf_specdec.training\nimport peft",
    ],
)
def test_peft_knows_our_adapters_in_either_order(adapter: tuple[Path, Path], imports: str) -> None:
    python(f"import sys\n{imports}\n{_LOAD}", *map(str, adapter))


def test_transformers_loads_heads_where_nobody_has_imported_peft(adapter: tuple[Path, Path]) -> None:
    python(
        "import sys, torch, hf_specdec\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert 'peft' not in sys.modules\n"
        "model.load_adapter(sys.argv[2])\n"
        "model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, speculative_mode='medusa')\n",
        *map(str, adapter),
    )


_WAITING = """
import sys
def waiting():
    return [finder for finder in sys.meta_path if type(finder).__module__.startswith("hf_specdec")]
"""


def test_no_import_is_waited_for_after_uninstalling() -> None:
    python(
        f"{_WAITING}\nimport hf_specdec\nassert len(waiting()) == 1\n"
        "hf_specdec.install()\nassert len(waiting()) == 1\n"
        "hf_specdec.uninstall()\nassert waiting() == []\n"
        "import peft\nassert 'MEDUSA' not in peft.PeftType.__members__\n"
        "hf_specdec.install()\nassert waiting() == []\n"
        "assert 'MEDUSA' in peft.PeftType.__members__\n"
    )


def test_the_import_of_peft_is_its_own() -> None:
    """Its loader and spec are those that it would have had."""
    describe = "print(type(peft.__loader__).__name__, type(peft.__spec__.loader).__name__, peft.__spec__.origin)"
    assert python(f"import hf_specdec, peft; {describe}") == python(f"import peft; {describe}")
    python(
        f"{_WAITING}\nimport importlib.util, hf_specdec\n"
        "assert importlib.util.find_spec('peft') is not None\n"  # as transformers asks
        "assert waiting(), 'asking is not importing'\n"
        "import peft\nassert waiting() == []\n"
    )


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("first", ["peft", "hf_specdec"])
def test_the_table_is_all_that_is_changed(first: str) -> None:
    said = python(
        f"{_SNAPSHOT}\n"
        "import transformers.generation.utils, transformers.integrations.peft, transformers.pipelines\n"
        "import transformers.models.llama.modeling_llama\n"
        + ("import peft, accelerate\n" if first == "peft" else "")
        + "before = snapshot()\n"
        "import hf_specdec\n"
        "import hf_specdec.cli.app, hf_specdec.heads, hf_specdec.training\n"
        "after = snapshot()\n"
        "known = {key: value for key, value in before.items() if key in after}\n"
        "print(sorted(f'{key[0]} {key[1]}' for key in changed(before, after)))\n"
        "print(sorted(f'{key[0]} {key[1]}' for key in added(before, after) if key[0].startswith('peft')))\n"
        "hf_specdec.uninstall()\n"
        "print(sorted(f'{key[0]} {key[1]}' for key in changed(before, snapshot())))\n"
    )
    changed, added, left = (eval(line) for line in said.splitlines()[-3:])
    table = {f"{row.owner}.{row.method}" for row in WRAPPED if first == "peft" or row.module != "peft"}
    # a class is seen in every module that it is a global of; its methods only where it is defined
    assert {entry.split()[1] for entry in changed} == table, changed
    members = {entry.split()[1] for entry in added}
    assert members <= {"PeftType.MEDUSA", "PeftType.TRAINED_EXIT"}, "PEFT's enum of adapter types grows, nothing else"
    assert left == []


def test_every_entry_of_the_table_says_why() -> None:
    assert len({(row.owner, row.method) for row in WRAPPED}) == len(WRAPPED)
    for row in WRAPPED:
        assert len(row.why) > 10
        assert hasattr(row.find_owner(), row.method)


def test_installing_twice_is_installing_once() -> None:
    before = {row: vars(row.find_owner())[row.method] for row in WRAPPED}
    hf_specdec.install()
    assert {row: vars(row.find_owner())[row.method] for row in WRAPPED} == before
    hf_specdec.uninstall()
    try:
        for row, method in before.items():
            assert vars(row.find_owner()).get(row.method) is not method
        plain = {row: vars(row.find_owner()).get(row.method) for row in WRAPPED}
        hf_specdec.uninstall()
        assert {row: vars(row.find_owner()).get(row.method) for row in WRAPPED} == plain
    finally:
        hf_specdec.install()
    model = tiny_model("llama")
    get_peft_model(model, MedusaConfig(num_heads=2))
    with hf_specdec.record() as stats:
        model.generate(max_new_tokens=4, speculative_mode="medusa", input_ids=model.dummy_inputs["input_ids"][:1])
    assert stats.calls == 1


def test_loaded_heads_can_be_saved_after_uninstalling(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("llama"), MedusaConfig(num_heads=2))
    hf_specdec.uninstall()
    try:
        model.save_pretrained(tmp_path)
        again = tiny_model("llama")
        PeftModel.from_pretrained(again, tmp_path)
        assert find_heads(again).num_heads == 2
    finally:
        hf_specdec.install()


# ---------------------------------------------------------------- wrapping


class Base:
    def method(self, x: int) -> str:
        """Says x."""
        return f"{type(self).__name__} {x}"

    @classmethod
    def made(cls, x: int) -> str:
        return f"{cls.__name__} {x}"


class Derived(Base):
    pass


def shouting(original, this, args, kwargs):
    return original(this, *args, **kwargs) + "!"


def test_methods_and_class_methods_are_wrapped_and_unwrapped() -> None:
    method, made = vars(Base)["method"], vars(Base)["made"]
    for name in ("method", "made"):
        wrapping.wrap(Base, name, shouting)
        wrapping.wrap(Base, name, shouting)  # once
    assert Base().method(1) == "Base 1!"
    assert Base().method(x=1) == "Base 1!"
    assert Base.made(2) == "Base 2!"
    assert Derived.made(2) == "Derived 2!"
    assert Base.method.__doc__ == "Says x."
    for name in ("method", "made"):
        wrapping.unwrap(Base, name)
        wrapping.unwrap(Base, name)
    assert vars(Base)["method"] is method
    assert vars(Base)["made"] is made


def test_an_inherited_method_is_wrapped_in_the_class_alone() -> None:
    wrapping.wrap(Derived, "method", shouting)
    try:
        assert (Derived().method(1), Base().method(1)) == ("Derived 1!", "Base 1")
    finally:
        wrapping.unwrap(Derived, "method")
    assert "method" not in vars(Derived)


def test_somebody_elses_wrapper_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    monkeypatch.setattr(Base, "method", vars(Base)["method"])  # put back at the end
    wrapping.wrap(Base, "method", shouting)
    ours = Base.method

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return "<" + ours(self, *args, **kwargs) + ">"

    Base.method = theirs  # type: ignore[method-assign]
    assert Base().method(1) == "<Base 1!>"
    wrapping.unwrap(Base, "method")
    assert Base.method is theirs
    assert Base().method(1) == "<Base 1>"
    wrapping.wrap(Base, "method", shouting)
    assert Base.method is theirs
    assert Base().method(1) == "<Base 1!>", "ours is on again, and once"
    wrapping.unwrap(Base, "method")


def test_a_wrapper_over_ours_that_does_not_say_what_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "method", vars(Base)["method"])
    wrapping.wrap(Base, "method", shouting)
    ours = Base.method

    def theirs(self, *args, **kwargs):
        return "<" + ours(self, *args, **kwargs) + ">"

    Base.method = theirs  # type: ignore[method-assign]
    wrapping.unwrap(Base, "method")
    assert Base().method(1) == "<Base 1>", "ours passes calls on"
    wrapping.wrap(Base, "method", shouting)
    assert Base.method is theirs
    assert Base().method(1) == "<Base 1!>"
    wrapping.unwrap(Base, "method")


def test_generate_wrapped_by_others_who_take_any_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before our import, or over ours: arguments keep their names, positional ones too."""
    model = tiny_model("llama")
    ids = prompt(1)["input_ids"]
    plain = model.generate(ids, max_new_tokens=6)
    inner = inspect.unwrap(GenerationMixin.generate)

    def theirs(self, *a, **k):
        return inner(self, *a, **k)

    monkeypatch.setattr(type(model), "generate", speculative(theirs), raising=False)
    config = GenerationConfig(max_new_tokens=6, eos_token_id=2, pad_token_id=0)
    for args, kwargs in (
        ((ids, config), {}),
        ((ids,), {"max_new_tokens": 6}),
        ((), {"inputs": ids, "max_new_tokens": 6}),
    ):
        with hf_specdec.record() as stats:
            assert model.generate(*args, speculative_mode="prompt_lookup", **kwargs).tolist() == plain.tolist()
        assert stats.calls == 1
    with pytest.raises(TypeError, match="several values for inputs"):
        model.generate(ids, inputs=ids, speculative_mode="prompt_lookup")


def test_a_module_that_fails_to_import_is_waited_for_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("raise RuntimeError('not yet')\n")
    monkeypatch.syspath_prepend(tmp_path)
    fired: list[str] = []
    before = list(sys.meta_path)
    wrapping.once_imported("waited_for", lambda: fired.append(sys.modules["waited_for"].value))
    with pytest.raises(RuntimeError, match="not yet"):
        __import__("waited_for")
    assert fired == []
    (tmp_path / "waited_for.py").write_text("value = 'there, at last'\n")
    __import__("waited_for")
    assert fired == ["there, at last"]
    assert sys.meta_path == before
    wrapping.once_imported("waited_for", lambda: fired.append("at once"))
    assert fired == ["there, at last", "at once"]
    del sys.modules["waited_for"]
