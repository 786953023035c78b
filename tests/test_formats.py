"""Other projects' heads: folders as Medusa v1, v2 and Medusa-2 leave them, read, converted, and exported for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import trained, weights
from conftest import prompt, run
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from hf_specdec.cli.app import main
from hf_specdec.errors import AdapterError, ConfigurationError
from hf_specdec.heads import find_heads
from hf_specdec.heads.formats import convert, export
from hf_specdec.testing import tiny_model

HEADS, LAYERS, SIZE, VOCABULARY = 3, 2, 32, 97


class _Block(nn.Module):
    """A residual block as the Medusa repository writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


def medusa(own_lm_head: bool) -> nn.ModuleList:
    """Heads whose state dict has the names of v1 (with LM heads) or v2."""
    torch.manual_seed(5)
    last = [nn.Linear(SIZE, VOCABULARY, bias=False)] if own_lm_head else []
    return nn.ModuleList(
        nn.Sequential(*[_Block() for _ in range(LAYERS)], *[nn.Linear(SIZE, VOCABULARY, bias=False) for _ in last])
        for _ in range(HEADS)
    )


def write(folder: Path, heads: nn.ModuleList, kind: str) -> None:
    folder.mkdir()
    # the number of heads is wrong, as it is in published folders
    settings = {"base_model_name_or_path": "org/tiny", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = heads.state_dict()
    if kind == "pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    elif kind == "safetensors":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    else:  # Medusa-2: one of the shards of a whole model
        save_file({"model.norm.weight": torch.ones(SIZE)}, folder / "model-00001-of-00002.safetensors")
        save_file(
            {f"medusa_head.{key}": tensor for key, tensor in tensors.items()},
            folder / "model-00002-of-00002.safetensors",
        )


def expected_logits(heads: nn.ModuleList, own_lm_head: bool, model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`[H, k, V]`, computed as the Medusa repository does."""
    return torch.stack([head(hidden) if own_lm_head else model.lm_head(head(hidden)) for head in heads])


@pytest.mark.parametrize("kind", ["pt", "safetensors", "medusa-2"])
@pytest.mark.parametrize("own_lm_head", [True, False], ids=["v1", "v2"])
def test_converted_heads_give_the_logits_of_a_direct_computation(tmp_path: Path, own_lm_head: bool, kind: str) -> None:
    theirs = medusa(own_lm_head)
    write(tmp_path / "theirs", theirs, kind)
    config = convert(tmp_path / "theirs", tmp_path / "ours")
    assert (config.num_heads, config.num_layers, config.own_lm_head) == (HEADS, LAYERS, own_lm_head)
    assert config.base_model_name_or_path == "org/tiny"
    model = tiny_model("llama")
    PeftModel.from_pretrained(model, tmp_path / "ours")
    heads = find_heads(model)
    hidden = torch.randn(4, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(
            heads.all_logits(heads.all_states(hidden)), expected_logits(theirs, own_lm_head, model, hidden)
        )
    plain = tiny_model("llama")
    plain.load_adapter(str(tmp_path / "ours"))
    assert all(torch.equal(weights(plain)[key], tensor) for key, tensor in weights(model).items())
    output, _ = run(plain, prompt(), max_new_tokens=12, speculative_mode="medusa")
    assert output.tolist() == run(model, prompt(), max_new_tokens=12)[0].tolist()


def test_command_line_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "theirs", medusa(own_lm_head=False), "pt")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--base", "org/other"]) == 0
    assert "3 heads of 2 residual blocks for org/other" in capsys.readouterr().out
    settings = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/other"


class _Run:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (print, ("a pickle was run",))


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(match: str, name: str = "medusa_lm_head.safetensors", **tensors: torch.Tensor) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        if tensors:
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name)
        with pytest.raises(AdapterError, match=match):
            convert(folder, folder / "out")
        assert not (folder / "out").exists()

    square, bias = torch.zeros(4, 4), torch.zeros(4)
    block = {"0.0.linear.weight": square, "0.0.linear.bias": bias}
    refused("no Medusa heads")
    refused("no Medusa heads", "model.safetensors", **{"lm_head.weight": square})
    refused("belongs to no layout", **block, **{"0.attention.weight": square})
    refused("not all of them", **block, **{"2.0.linear.weight": square})
    refused("not all of them", **block, **{"1.0.linear.weight": square, "1.1.linear.weight": square})
    refused("not all of them", **block, **{"1.0.linear.weight": square, "0.1.weight": square})
    refused("without its weight", **block, **{"1.0.linear.bias": bias})
    refused("without its weight", **{"0.0.linear.bias": bias})
    refused("belongs to no layout", **{"00.0.linear.weight": square})
    refused("empty", **{"0.0.linear.weight": torch.zeros(0, 0)})
    refused("do not fit", **{"0.0.linear.weight": torch.tensor(1.0)})
    refused("do not fit", **{"0.0.linear.weight": square, "0.0.linear.bias": torch.zeros(5)})
    refused("not finite", **{"0.0.linear.weight": square * torch.nan})
    refused("wrong type", **block, token_map=torch.tensor([0.5, 1.5]))
    refused("twice", **block, **{"0.1.weight": square, "0.5.weight": square})
    refused("do not fit", **{"0.0.linear.weight": torch.zeros(4, 5)})
    refused("do not fit", **block, **{"0.1.weight": torch.zeros(9, 5)})
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match="is a file"):
        convert(tmp_path, tmp_path / "file")
    numbered = tmp_path / "numbered"
    numbered.mkdir()
    torch.save({0: square}, numbered / "medusa_lm_head.pt")
    with pytest.raises(AdapterError, match="named tensors"):
        convert(numbered, numbered / "out")
    folder = tmp_path / "pickle"
    folder.mkdir()
    torch.save({"0.0.linear.weight": _Run()}, folder / "medusa_lm_head.pt")
    with pytest.raises(AdapterError, match="cannot be read"):
        convert(folder, folder / "out")
    assert "a pickle was run" not in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "neither a folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["independent", "own", "own_trimmed", "low_rank_trimmed"])
def test_exported_folder_is_what_vllm_loads(tmp_path: Path, kind: str) -> None:
    model = tiny_model("llama")
    trained(model, kind)
    heads = find_heads(model)
    layers, drafted = heads.config.num_layers, heads.config.draft_vocab_size or VOCABULARY
    command = export(heads, "vllm", tmp_path / "vllm", "org/tiny")
    assert command == (
        'vllm serve org/tiny --speculative-config \'{"method": "medusa", "model": "'
        f'{tmp_path / "vllm"}", "num_speculative_tokens": 3}}\''
    )
    settings = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert settings == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": SIZE,
        "vocab_size": VOCABULARY,
        "truncated_vocab_size": drafted,
        "num_heads": 3,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": kind == "independent",
        "torch_dtype": "float32",
    }
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    shapes = {f"lm_heads.{head}.weight": (drafted, SIZE) for head in range(3)}
    for head in range(3):
        for layer in range(layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (SIZE, SIZE)
            shapes[f"blocks.{head}.layers.{layer}.bias"] = (SIZE,)
    if drafted != VOCABULARY:
        shapes["token_map"] = (drafted,)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    # computed as vLLM computes it
    hidden = torch.randn(2, SIZE)
    for head in range(3):
        x = hidden
        for layer in range(layers):
            block = f"blocks.{head}.layers.{layer}"
            x = x + functional.silu(functional.linear(x, tensors[f"{block}.weight"], tensors[f"{block}.bias"]))
        with torch.no_grad():
            ours = heads.all_logits(heads.all_states(hidden))[head]
        torch.testing.assert_close(functional.linear(x, tensors[f"lm_heads.{head}.weight"]), ours)
    # and back
    config = convert(tmp_path / "vllm", tmp_path / "ours", base="org/tiny")
    assert (config.num_heads, config.num_layers, config.draft_vocab_size) == (
        3,
        layers,
        None if drafted == VOCABULARY else drafted,
    )
    again = tiny_model("llama")
    PeftModel.from_pretrained(again, tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(
            find_heads(again).all_logits(find_heads(again).all_states(hidden)),
            heads.all_logits(heads.all_states(hidden)),
        )


def test_sequential_heads_cannot_be_served_by_vllm(tmp_path: Path) -> None:
    model = tiny_model("llama")
    trained(model, "sequential")
    with pytest.raises(AdapterError, match="head_type='independent'"):
        export(find_heads(model), "vllm", tmp_path / "vllm", "org/tiny")
    assert not (tmp_path / "vllm").exists()


def test_what_no_format_holds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama")
    trained(model, "exit").save_pretrained(tmp_path / "exit")
    with pytest.raises(AdapterError, match="'exit' cannot be written for vllm; those that can: independent"):
        export(find_heads(model), "vllm", tmp_path / "vllm", "org/tiny")
    with pytest.raises(ConfigurationError, match="Unknown format 'ggml'"):
        export(find_heads(model), "ggml", tmp_path / "vllm", "org/tiny")
    assert main(["convert", str(tmp_path / "exit"), str(tmp_path / "vllm"), "--to", "ggml"]) == 2
    assert "known formats are peft, vllm" in capsys.readouterr().err
    assert not (tmp_path / "vllm").exists()


def test_command_line_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    trained(tiny_model("llama"), "independent").save_pretrained(tmp_path / "heads")
    arguments = ["convert", str(tmp_path / "heads"), str(tmp_path / "vllm"), "--to", "vllm"]
    assert main([*arguments, "--base", str(tmp_path / "base")]) == 0
    assert f"vllm serve {tmp_path / 'base'} --speculative-config" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "--base" in capsys.readouterr().err
