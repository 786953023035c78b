"""A trained exit for `early_exit`: what it reads, that reading token by token is reading the text, and exactness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, assert_unchanged, model_of, prompt, run, snapshot
from peft import inject_adapter_in_model

from hf_specdec import EarlyExitDrafter
from hf_specdec.context import Context
from hf_specdec.draft import Draft, Scores, Verdict
from hf_specdec.errors import AdapterError, InvalidSettingError, UnsupportedModelError
from hf_specdec.heads import BoundExit, MedusaConfig, TrainedExitConfig, find_heads
from hf_specdec.heads.trained_exit.network import ExitReader
from hf_specdec.target.hidden import watch
from hf_specdec.testing import tiny_model

EXIT = 2


def with_exit(name: str = "llama", seed: int = 0, **config: Any) -> Any:
    model = tiny_model(name)
    inject_adapter_in_model(TrainedExitConfig(exit_layer=EXIT, **config), model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in exit_of(model).weights.parameters():
            if weight.dim() == 2:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def exit_of(model: Any) -> BoundExit:
    return find_heads(model, mode="early_exit")


def hidden_at_exit(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad(), watch(model, [EXIT]) as seen:
        model(torch.tensor([text]), use_cache=False)
    return seen[EXIT][0]


def asked(**config: Any) -> dict[str, Any]:
    return {"speculative_mode": "early_exit", "speculative_config": {"num_draft_tokens": 4, **config}}


def test_reading_token_by_token_is_reading_the_text() -> None:
    exit_ = exit_of(with_exit(draft_vocab_size=50))
    hidden = torch.randn(2, 9, 32)
    lengths = [9, 6]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        whole = exit_.shared_logits(exit_.states(hidden, mask))
        assert whole.shape == (2, 9, 50)
        reader = ExitReader(exit_, rows=2)
        for row, length in enumerate(lengths):
            reader.commit(row, hidden[row, : length - 3])
        for ahead in range(3):  # drafts, one token after another
            at = [length - 3 + ahead for length in lengths]
            scores = reader.draft([0, 1], hidden[[0, 1], at])
            torch.testing.assert_close(scores, whole[[0, 1], at], rtol=1e-4, atol=1e-4)
        reader.draft([1], torch.randn(1, 32))  # a wrong turn, that is not committed
        for row, length in enumerate(lengths):
            reader.commit(row, hidden[row, length - 3 : length - 1])
        assert [reader.length(row) for row in (0, 1)] == [8, 5]
        last = reader.draft([0, 1], hidden[[0, 1], [8, 5]])
        torch.testing.assert_close(last, whole[[0, 1], [8, 5]], rtol=1e-4, atol=1e-4)


def test_an_untrained_exit_is_the_hidden_state_under_a_norm() -> None:
    model = tiny_model("llama")
    inject_adapter_in_model(TrainedExitConfig(exit_layer=EXIT), model)
    exit_, hidden = exit_of(model), torch.randn(1, 3, 32)
    with torch.no_grad():
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(exit_.states(hidden, torch.ones(1, 3, dtype=torch.bool)), normed)


def test_nothing_is_read_while_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_ = exit_of(with_exit())
    reader, read = ExitReader(exit_, rows=1), []
    original = type(exit_.weights.layer).keys_and_values

    def noting(layer: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        read.append(hidden.shape[1])
        return original(layer, hidden, positions)

    monkeypatch.setattr(type(exit_.weights.layer), "keys_and_values", noting)
    for count in (5, 1, 2):
        reader.commit(0, torch.randn(count, 32))
        reader.start_drafting()
    assert (read, reader.length(0)) == ([], 8)
    with torch.no_grad():
        reader.draft([0], torch.randn(1, 32))
    assert (read, reader.length(0)) == ([8, 1], 9)


class Watching(EarlyExitDrafter):
    """Checks that what the exit has read is what the model computes for the committed text."""

    checked = 0

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        super().observe(context, draft, scores, verdict)
        assert self.trained is not None
        assert self._reader is not None
        for row, text in enumerate(context.tokens):
            if not verdict.committed[row]:
                continue
            expected = hidden_at_exit(self.model, text[:-1])[None]
            positions = torch.arange(len(text) - 1)[None]
            with torch.no_grad():
                keys, values = self.trained.weights.layer.keys_and_values(expected, positions)
                self._reader._read(row)
            torch.testing.assert_close(self._reader._keys[row], keys, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(self._reader._values[row], values, rtol=1e-3, atol=1e-4)
            type(self).checked += 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("num_draft_tokens", [4, "auto"])
def test_it_reads_what_was_committed(name: str, num_draft_tokens: int | str) -> None:
    """In rounds with drafts and without, with leaves accepted, and rows that finish at different times."""
    model = with_exit(name)
    inputs = prompt(3, padding=3, repeat=True)
    plain, _ = run(model, inputs, max_new_tokens=20)
    eos = [int(plain[0, 12 + 5])]
    expected, _ = run(model, inputs, max_new_tokens=20, eos_token_id=eos)
    drafter = Watching(model, None, exit_of(model))
    Watching.checked = 0
    output, _ = run(
        model,
        inputs,
        max_new_tokens=20,
        eos_token_id=eos,
        speculative_mode=drafter,
        speculative_config={"num_draft_tokens": num_draft_tokens},
    )
    assert output.tolist() == expected.tolist()
    assert Watching.checked > 10


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt2", "opt", "mixtral", "phi3"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_same_text(name: str, batch: int, do_sample: bool) -> None:
    model = with_exit(name, draft_vocab_size=60)
    stats = assert_same(
        model, prompt(batch, padding=3, repeat=True), asked(), max_new_tokens=24, do_sample=do_sample, top_k=30
    )
    assert stats.total.drafted > 0
    assert_same(model, prompt(batch), {"speculative_mode": "early_exit"}, max_new_tokens=24, do_sample=do_sample)


def test_the_model_is_left_as_it_was() -> None:
    model = with_exit()
    before = snapshot(model)
    run(model, prompt(), max_new_tokens=12, **asked())
    assert_unchanged(model, before)


def test_which_adapter_is_for_which_mode() -> None:
    model = with_exit()
    with pytest.raises(AdapterError, match="no Medusa heads"):
        run(model, prompt(), max_new_tokens=4, speculative_mode="medusa")
    with pytest.raises(InvalidSettingError, match="exit_layer is 1"):
        run(model, prompt(), max_new_tokens=4, **asked(exit_layer=1, adapter="default"))
    with pytest.raises(AdapterError, match="no trained exit 'other'"):
        run(model, prompt(), max_new_tokens=4, **asked(adapter="other"))
    # an exit_layer of one's own wins over the adapter, and both kinds go side by side
    assert_same(model, prompt(), asked(exit_layer=1), max_new_tokens=12)
    inject_adapter_in_model(MedusaConfig(num_heads=2), model, adapter_name="heads")
    assert find_heads(model, mode="medusa").num_heads == 2
    assert find_heads(model).num_heads == 2, "the active adapter's"
    assert exit_of(model).exit_layer == EXIT
    assert_same(model, prompt(), asked(), max_new_tokens=12)
    assert_same(model, prompt(), {"speculative_mode": "medusa"}, max_new_tokens=12)


def test_a_broken_exit_is_named_and_not_passed_over() -> None:
    model = with_exit()
    with torch.no_grad():
        exit_of(model).weights.layer.up.weight[0, 0] = torch.nan
    with pytest.raises(AdapterError, match=r"not finite in layer\.up\.weight"):
        run(model, prompt(), max_new_tokens=4, speculative_mode="early_exit")


def test_models_that_cannot_be_halved_are_refused() -> None:
    model = with_exit("falcon_alibi")
    with pytest.raises(UnsupportedModelError, match="two halves"):
        run(model, prompt(), max_new_tokens=4, **asked())
    with pytest.raises(AdapterError, match="only 3 layers"):
        inject_adapter_in_model(TrainedExitConfig(exit_layer=3), tiny_model("llama"))
    assert not hasattr(model_of("llama"), "peft_config")
