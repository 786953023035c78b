"""The two halves of a model, what each of them runs, and when an exit is taken."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from conftest import CHAINS_ONLY, assert_same, assert_unchanged, model_of, prompt, run, snapshot

import hf_specdec
from hf_specdec.draft import Budget
from hf_specdec.drafters import exit_choice
from hf_specdec.drafters.early_exit import EarlyExitDrafter
from hf_specdec.drafters.exit_choice import ExitChoice
from hf_specdec.errors import InvalidSettingError, UnsupportedModelError
from hf_specdec.host.modules import watching_hook
from hf_specdec.target import kv_cache as kv
from hf_specdec.target.cached_model import CachedModel
from hf_specdec.target.halves import Halves
from hf_specdec.target.layers import find_layers
from hf_specdec.target.selftest import halves_agree, support
from hf_specdec.testing import tiny_model_names


def asking(exit_layer: int | str = 1, drafted: int | str = 4, **settings: Any) -> dict[str, Any]:
    return {
        "speculative_mode": "early_exit",
        "speculative_config": {"exit_layer": exit_layer, "num_draft_tokens": drafted, **settings},
    }


def agreeing_model(exit_layer: int = 1, scale: float = 0.0) -> Any:
    """A model whose layers above the exit say little."""
    model = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        for layer in model.model.layers[exit_layer:]:
            layer.self_attn.o_proj.weight *= scale
            layer.mlp.down_proj.weight *= scale
    return model


class Calls:
    """Counts how often each layer runs, and over how many tokens."""

    def __init__(self, model: Any) -> None:
        self.widths: list[list[int]] = []
        self.hooks = []
        for layer in find_layers(model)[1]:
            widths: list[int] = []
            self.widths.append(widths)
            self.hooks.append(
                watching_hook(layer, lambda module, args, output, widths=widths: widths.append(_width(output)))
            )

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()


def _width(output: Any) -> int:
    return (output[0] if isinstance(output, tuple) else output).shape[1]


# ---------------------------------------------------------------- the halves


@pytest.mark.parametrize("name", tiny_model_names(with_encoder=False))
@pytest.mark.parametrize("exit_layer", [1, 2])
def test_halves_are_the_whole(name: str, exit_layer: int) -> None:
    model = model_of(name)
    before = snapshot(model)
    assert halves_agree(model, exit_layer) == support(model).trees == (name not in CHAINS_ONLY)
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "opt"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_verification_goes_on_from_whatever_ran_below(name: str, attention: str) -> None:
    """Nodes left out, in another order, or not run yet; rows of different lengths; round after round."""
    model = model_of(name, attn_implementation=attention)
    halves = Halves(model, 2)
    texts = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]]
    ours, _ = CachedModel.filled(model, support(model), texts)
    plain, _ = CachedModel.filled(model, support(model), texts)
    windows = kv.has_windows(ours.cache)
    with torch.no_grad():
        for shift in range(4):
            root = 30 + shift
            ours.forward_below(halves, [[root], [root]], [[-1], [-1]])
            ours.forward_below(halves, [[40], [50]], [[0], [0]])
            ours.forward_below(halves, [[41, 42], [51]], [[1, 0], [1]])
            verified = [[root, 42, 40, 60, 61], [root, 50, 51]]
            parents = [[-1, 0, 0, 2, 3], [-1, 0, 1]]
            with Calls(model) as calls:
                mine = ours.forward(verified, parents).logits
            # what has not run yet runs below on its own; a window would not show it what it must see
            assert [len(widths) for widths in calls.widths] == [1, 1, 1]
            assert calls.widths[2] == [5]
            assert calls.widths[0] == ([5] if windows else [2])
            theirs = plain.forward(verified, parents).logits
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine[1, :3], theirs[1, :3], rtol=1e-4, atol=1e-4)
            for runner in (ours, plain):
                runner.commit([[0, 2, 3], [0, 1]])
            assert ours.slots.next_position == plain.slots.next_position


def test_what_ran_below_can_be_dropped() -> None:
    model = model_of("gemma3")
    halves = Halves(model, 2)
    ours, _ = CachedModel.filled(model, support(model), [list(range(5, 25))])
    plain, _ = CachedModel.filled(model, support(model), [list(range(5, 25))])
    with torch.no_grad():
        ours.forward_below(halves, [[30]], [[-1]])
        ours.forward_below(halves, [[31]], [[0]])
        ours.drop_lower_half()
        mine, theirs = (runner.forward([[30, 32]], [[-1, 0]]).logits for runner in (ours, plain))
    torch.testing.assert_close(mine, theirs)


def test_a_model_that_cannot_be_cut_is_refused_by_name() -> None:
    whole = model_of("llama")

    class Sealed(type(whole)):
        """Asks another model, so no part of it can run."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return whole(*args, **kwargs)

    model = Sealed(whole.config).eval()
    model.generation_config = whole.generation_config
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"Sealed did not run its first 1 layers.*speculative_mode"):
        run(model, prompt(), max_new_tokens=5, **asking())
    assert_unchanged(model, before)
    expected, _ = run(model_of("llama"), prompt(), max_new_tokens=5)
    with pytest.warns(UserWarning, match="Decoding plainly"):
        output, _ = run(model, prompt(), max_new_tokens=5, **asking(on_unsupported="plain"))
    assert output.tolist() == expected.tolist()


def test_a_forward_that_was_wrapped_in_between_changes_nothing() -> None:
    """As torch.compile and accelerate's hooks do: what they put on the object is bound to the whole model."""
    model = copy.deepcopy(model_of("llama"))
    inputs = prompt(2, padding=4, repeat=True)
    assert_same(model, inputs, asking(), max_new_tokens=10)
    for owner in (model.model, model):
        forward = owner.forward
        owner.forward = functools.wraps(forward)(lambda *args, forward=forward, **kwargs: forward(*args, **kwargs))
        stats = assert_same(model, inputs, asking(num_draft_tokens=4), max_new_tokens=10)
        assert stats.total.drafted > 0


def test_rows_go_in_step_where_the_early_layers_cannot_do_otherwise() -> None:
    from transformers import BartConfig, BartForCausalLM

    config = BartConfig(
        vocab_size=97, d_model=32, num_hidden_layers=3, encoder_layers=3, decoder_layers=3, decoder_ffn_dim=48,
        decoder_attention_heads=4, max_position_embeddings=256, is_decoder=True, init_std=0.3, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BartForCausalLM(config).double().eval()
    model.generation_config = model_of("llama").generation_config
    inputs = prompt(3, length=14, padding=4, repeat=True)
    assert not halves_agree(model, 1)  # so that the early layers have a cache of their own
    assert_same(model, inputs, asking(exit_layer=1), max_new_tokens=24)


def test_more_alternatives_than_tokens() -> None:
    assert_same(model_of("llama"), prompt(), asking(num_alternatives=200, num_draft_tokens=5), max_new_tokens=10)


def test_layers_that_cannot_be_told_apart_are_refused_by_name() -> None:
    model = copy.deepcopy(model_of("llama"))
    model.model.others = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
    with pytest.raises(UnsupportedModelError, match="several lists of 3 layers"):
        run(model, prompt(), max_new_tokens=5, **asking())


def test_without_reuse_the_early_layers_draft_with_their_own_cache() -> None:
    model = model_of("falcon_alibi")
    drafter = EarlyExitDrafter(model, hf_specdec.EarlyExitConfig(exit_layer=2))
    stats = assert_same(
        model,
        prompt(repeat=True),
        {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 3}},
        max_new_tokens=20,
    )
    assert drafter._own_cache is not None
    assert stats.total.drafted > 0


# ---------------------------------------------------------------- who runs what


@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("drafted", [1, 3, 5])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_layers_run_as_often_as_they_must(name: str, exit_layer: int, drafted: int) -> None:
    model, inputs = model_of(name), prompt(length=12)
    with Calls(model) as calls:
        halves_agree(model, exit_layer)  # the self-test runs once per model
        for widths in calls.widths:
            widths.clear()
        with hf_specdec.record() as stats:
            run(
                model,
                inputs,
                max_new_tokens=40,
                eos_token_id=None,
                **asking(exit_layer, drafted, num_alternatives=0),
            )
    for index, widths in enumerate(calls.widths):
        assert widths[0] == 12, "the prompt passes every layer first"
        assert 12 not in widths[1:], "and never again"
        runs = len(widths) - 1
        if index >= exit_layer:
            assert runs == stats.rounds
        else:
            # every round runs its root and all drafted tokens but the last, which verification brings
            assert stats.rounds <= runs <= stats.total.drafted + stats.rounds
            assert runs > stats.rounds
        assert sum(widths[1:]) == stats.total.drafted + stats.rounds, "every node passes every layer once"


def test_alternatives_are_drafted_beside_the_chain() -> None:
    model = agreeing_model(scale=0.3)
    drafts = []
    for alternatives in (0, 2):
        drafter = EarlyExitDrafter(model, hf_specdec.EarlyExitConfig(exit_layer=1, num_alternatives=alternatives))
        seen: list[Any] = []
        propose = drafter.propose

        def watched(context: Any, budget: Any, propose: Any = propose, seen: list = seen) -> Any:
            seen.append(propose(context, budget))
            return seen[-1]

        drafter.propose = watched  # type: ignore[method-assign]
        assert_same(
            model,
            prompt(2, padding=3),
            {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 6}},
            max_new_tokens=30,
            eos_token_id=None,
        )
        drafts.append(seen)
    assert all(draft.is_chain for draft in drafts[0])
    assert any(len(below[0]) == 3 for draft in drafts[1] for below in draft.children)


def test_what_the_exit_drafts_is_what_the_exit_says() -> None:
    """Where the layers above add nothing, every draft is accepted whole."""
    model = agreeing_model()
    for do_sample in (False, True):
        stats = assert_same(
            model,
            prompt(3, padding=2),
            asking(1, 4, num_alternatives=0),
            max_new_tokens=41,
            do_sample=do_sample,
            eos_token_id=None,
        )
        assert stats.mean_acceptance_length == 5.0


# ---------------------------------------------------------------- which exit


def budget(cost: Any) -> Budget:
    return Budget(depth=[8], room=[8], nodes=8, trees=True, pays=lambda chains: True, cost=cost)


def test_auto_measures_on_the_prompt_and_takes_the_exit_that_pays() -> None:
    model = agreeing_model()
    drafter = EarlyExitDrafter(model)
    # a fixed size, since on a model this small no draft is cheap
    asked = {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 3}}
    stats = assert_same(model, prompt(2, length=20, padding=4), asked, max_new_tokens=24)
    assert {exit_layer: counts[0] / counts[1] for exit_layer, counts in ExitChoice(model).agreement.items()} == {
        1: 1.0,
        2: 1.0,
    }
    assert drafter._halves is not None
    assert drafter._halves.exit_layer == 1
    assert stats.mean_acceptance_length > 1.5


def test_auto_declines_where_no_exit_agrees() -> None:
    model = copy.deepcopy(model_of("llama"))
    drafter = EarlyExitDrafter(model)
    stats = assert_same(model, prompt(2, length=20), {"speculative_mode": drafter}, max_new_tokens=24)
    assert drafter._decided
    assert drafter._halves is None
    assert drafter._own_cache is None
    assert stats.total.drafted == 0
    assert stats.draft_seconds < stats.verify_seconds


def test_auto_declines_too_where_there_is_one_exit_only() -> None:
    model = model_of("llama", num_hidden_layers=2)
    drafter = EarlyExitDrafter(model)
    stats = assert_same(model, prompt(length=20), {"speculative_mode": drafter}, max_new_tokens=12)
    assert ExitChoice(model).agreement[1][1] == 16
    assert drafter._halves is None
    assert stats.total.drafted == 0


def test_a_single_layer_has_no_exit() -> None:
    model = model_of("llama", num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="single layer"):
        run(model, prompt(), max_new_tokens=4, speculative_mode="early_exit")


def test_auto_stops_measuring_once_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of("llama"))
    monkeypatch.setattr(exit_choice, "_ENOUGH", 30)
    for calls in range(1, 5):
        run(model, prompt(length=20), max_new_tokens=3, speculative_mode="early_exit")
        assert ExitChoice(model).agreement[1][1] == min(16 * calls, 32)


def test_measuring_leaves_no_hook_behind() -> None:
    model = copy.deepcopy(model_of("llama"))
    before = snapshot(model)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of luck")

    support(model)
    halves_agree(model, 1)
    hook = watching_hook(model.model.norm, fail, before=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(model, prompt(), max_new_tokens=4, speculative_mode="early_exit")
    hook.remove()
    assert_unchanged(model, before)


@pytest.mark.parametrize("fails_at", [1, 2, 5])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_inside_leaves_the_model_able_to_generate(layer: int, fails_at: int, error: type) -> None:
    model = copy.deepcopy(model_of("gpt2"))
    halves_agree(model, 1)
    before = snapshot(model)
    calls = 0

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise error("out of luck")

    hook = watching_hook(find_layers(model)[1][layer], fail, before=True)
    with pytest.raises(error, match="out of luck"):
        run(model, prompt(), max_new_tokens=30, eos_token_id=None, **asking(1, 2))
    hook.remove()
    assert_unchanged(model, before)
    assert_same(model, prompt(), asking(1, 2), max_new_tokens=20)


@pytest.mark.parametrize("exit_layer", [0, 3, 99, -1, "late", 1.5])
def test_exits_that_the_model_does_not_have(exit_layer: Any) -> None:
    model = model_of("llama")
    before = snapshot(model)
    support(model)
    with Calls(model) as calls, pytest.raises(InvalidSettingError, match="exit_layer must be"):
        run(model, prompt(), max_new_tokens=4, **asking(exit_layer))
    assert not any(calls.widths)
    assert_unchanged(model, before)


def test_a_promise_weighs_agreement_and_cost() -> None:
    choice = ExitChoice(agreeing_model())
    choice.agreement.update({1: [160, 160], 2: [160, 160]})
    good = choice.promise(1, lambda nodes: 1.0, reuses=True)
    assert good > choice.promise(2, lambda nodes: 1.0, reuses=True) > 1.0
    assert good > choice.promise(1, lambda nodes: float(nodes), reuses=True)
    assert good > choice.promise(1, lambda nodes: 1.1, reuses=False)
    choice.agreement.update({1: [0, 160], 2: [80, 160]})
    assert choice.promise(1, lambda nodes: 1.0, reuses=True) < 1.0
