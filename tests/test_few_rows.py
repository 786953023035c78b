"""Linear layers that are fast on a few rows: the same products, and the model is not touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, assert_unchanged, prompt, run, snapshot
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_specdec.target import few_rows
from hf_specdec.target.few_rows import FEW_ROWS, Linear, linear, quick_on_few_rows, quickest
from hf_specdec.target.halves import Halves
from hf_specdec.testing import tiny_model


@pytest.fixture(autouse=True)
def quick_from_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quickest where these layers were made for, whatever it is on the machine that tests."""
    sizes = [0, *(min(size for size in few_rows._QUICK if size >= rows) for rows in range(1, FEW_ROWS + 1))]
    monkeypatch.setattr(few_rows, "quickest", lambda threads: tuple(sizes))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_the_same_for_few_rows_and_many(bias: bool) -> None:
    layer = Linear(24, 40, bias=bias)
    shapes = [(1, 1), (1, 4), (3, 5), (2, 2, 2), (0,), *((rows,) for rows in range(1, FEW_ROWS + 2))]
    for shape in shapes:
        states = torch.randn(*shape, 24)
        found = layer(states)
        torch.testing.assert_close(found, functional.linear(states, layer.weight, layer.bias))
        assert found.is_contiguous()


class _Columns(TorchFunctionMode):
    """Keeps how many columns every product has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.addmm):
            self.seen.append(arguments[-1].shape[-1])
        return function(*arguments, **(settings or {}))


@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_filled_up_to_the_next_quick_number(bias: bool) -> None:
    layer = Linear(6, 3, bias=bias)
    for rows, filled in ((1, 2), (2, 2), (3, 4), (7, 8), (9, 16), (16, 16)):
        with _Columns() as columns:
            layer(torch.randn(rows, 6))
        assert columns.seen == [filled]
    with _Columns() as columns:
        layer(torch.randn(17, 6))
    assert not columns.seen


def test_what_is_quickest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    measured = quickest(torch.get_num_threads())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(measured) == FEW_ROWS + 1
    assert measured[0] == 0
    assert all(size == 0 or (size in few_rows._QUICK and size >= rows) for rows, size in enumerate(measured))

    # seconds of the products from the left, then of the straight ones (1, 2, 4, 5, 6, 8 and 16 rows)
    times = iter([1.0, 1.2, 2.0, 3.0, 3.0, 2.0, 2.0, 1.0, 2.0, 2.0, 4.0, 4.0, 2.0])
    monkeypatch.setattr(few_rows, "_seconds", lambda product, states: next(times))
    assert quickest.__wrapped__(1) == (0, 2, 0, 4, 4, 0, 6, 8, 8, *[0] * 8)


def test_without_gain_the_straight_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(few_rows, "quickest", lambda threads: (0,) * (FEW_ROWS + 1))
    assert quick_on_few_rows(model) is model
    layer, states = Linear(8, 5), torch.randn(3, 8)
    assert torch.equal(layer(states), functional.linear(states, layer.weight, layer.bias))


def test_gradients_flow_through_few_rows() -> None:
    layer, states = Linear(6, 3), torch.randn(4, 6, requires_grad=True)
    layer(states).square().sum().backward()
    found = [states.grad, layer.weight.grad, layer.bias.grad]
    states.grad = layer.weight.grad = layer.bias.grad = None
    functional.linear(states, layer.weight, layer.bias).square().sum().backward()
    for one, other in zip(found, [states.grad, layer.weight.grad, layer.bias.grad], strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product of a few."""
    seen: list[int] = []

    def noting(states: torch.Tensor, *weights: Any) -> torch.Tensor:
        rows = states.numel() // states.shape[-1]
        if rows <= FEW_ROWS:
            seen.append(rows)
        return linear(states, *weights)

    monkeypatch.setattr(few_rows, "linear", noting)
    return seen


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_quick_model_is_the_model(name: str, few: list[int]) -> None:
    model = tiny_model(name)
    before = snapshot(model)
    quick = quick_on_few_rows(model)
    assert quick is not model
    assert isinstance(quick, type(model))
    for shape in ((1, 1), (1, 4), (3, 5), (2, 20)):
        ids = torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(quick(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert set(few) == {1, 4, 15}
    assert type(model.get_output_embeddings()) is nn.Linear
    assert_unchanged(model, before)
    with torch.no_grad():  # weights are shared
        model.get_output_embeddings().weight.zero_()
        assert not quick(input_ids=ids).logits.any()


def test_what_has_nothing_to_gain_stays() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = tiny_model("llama", dtype=dtype)
        assert quick_on_few_rows(model) is model
    gpt2 = tiny_model("gpt2")  # its layers are no linear ones, but for the LM head
    changed = [name for name, module in quick_on_few_rows(gpt2).named_modules() if type(module) is Linear]
    assert changed == ["lm_head"]


def test_a_forward_of_its_own_is_kept() -> None:
    """As accelerate puts one on a module that it moves between devices."""
    model, calls = tiny_model("llama"), []
    inner = model.model.layers[0].mlp
    original = inner.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    inner.forward = watched
    quick = quick_on_few_rows(model)
    quick(input_ids=torch.tensor([[5, 6, 7]]))
    assert calls == [1]
    assert quick.model.layers[0].mlp is inner
    assert type(quick.model.layers[1].mlp.up_proj) is Linear


def test_what_is_compiled_stays_compiled() -> None:
    model = tiny_model("llama")
    inner = model.model.layers[0].mlp
    inner.compile(backend="eager")
    quick = quick_on_few_rows(model)
    assert quick.model.layers[0].mlp is inner
    assert type(quick.model.layers[1].mlp.up_proj) is Linear
    model.compile(backend="eager")
    assert quick_on_few_rows(model) is model
    # the parts of a compiled model run as parts
    halves = Halves(model, exit_layer=2)
    with torch.no_grad(), halves.taken() as taken:  # raises if the whole model ran
        halves.below(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert taken.hidden is not None


class _OnlyLinear(torch.Tensor):
    """A weight that knows no other product, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.addmm):
            raise NotImplementedError
        found = super().__torch_function__(function, types, arguments, settings or {})
        return found.as_subclass(torch.Tensor) if function is functional.linear else found


def test_weights_of_another_kind_stay() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_OnlyLinear))
    quick = quick_on_few_rows(model)
    assert quick.model.layers[1].mlp.up_proj is layer
    quick(input_ids=torch.tensor([[5, 6, 7]]))


def test_hooks_run() -> None:
    model, seen = tiny_model("llama"), []
    quick = quick_on_few_rows(model)
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: seen.append("layer"))
    model.model.layers[1].register_forward_hook(lambda *_: seen.append("block"))
    quick(input_ids=torch.tensor([[5, 6, 7]]))
    assert seen == ["layer", "block"]


@pytest.mark.parametrize("mode", ["prompt_lookup", "early_exit"])
def test_verification_is_quick(mode: str, few: list[int]) -> None:
    model, inputs = tiny_model("llama"), prompt(repeat=True)
    run(model, inputs, max_new_tokens=20)
    assert not few
    config: dict[str, Any] = {"num_draft_tokens": 3, **({"exit_layer": 2} if mode == "early_exit" else {})}
    assert_same(model, inputs, {"speculative_mode": mode, "speculative_config": config}, max_new_tokens=20)
    assert few


def test_the_layers_above_an_exit_are_quick() -> None:
    model = tiny_model("llama")
    above = Halves(model, exit_layer=2).above
    layers = [module for module in above.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert {type(layer) for layer in layers} == {Linear}
