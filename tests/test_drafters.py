"""What the drafters propose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, model_of, prompt, run
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import AssistantDrafter, Budget, Context, PromptLookupConfig, PromptLookupDrafter
from hf_specdec.drafters.prompt_lookup import SuffixIndex
from hf_specdec.host.modules import watching_hook
from hf_specdec.sampling import Selection


def context_of(*texts: list[int]) -> Context:
    return Context(
        tokens=[list(text) for text in texts],
        prompt_lengths=[len(text) for text in texts],
        finished=[False] * len(texts),
        device=torch.device("cpu"),
        selection=Selection(LogitsProcessorList(), False, None),
        padded_prompts=torch.tensor([texts[0]]),
    )


def budget(depth: int, rows: int = 1, trees: bool = True) -> Budget:
    return Budget(depth=[depth] * rows, room=[depth] * rows, nodes=depth, trees=trees, pays=lambda chains: True)


def lookup(text: list[int], depth: int = 6, trees: bool = False, **config: Any) -> list[int]:
    """The best chain that prompt lookup drafts after `text`."""
    drafter, context = PromptLookupDrafter(PromptLookupConfig(**config)), context_of(text)
    drafter.start(context)
    return drafter.propose(context, budget(depth, trees=trees)).best_chain().tokens[0][1:]


def test_lookup_copies_what_followed_the_suffix() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9, 1, 2]


def test_lookup_drafts_nothing_without_evidence() -> None:
    assert lookup([1, 2, 3, 4, 5]) == []
    assert lookup([7]) == []
    assert lookup([1, 2, 3, 1], min_match_length=2) == []


def test_lookup_prefers_the_longest_match_to_the_first() -> None:
    # after "5": first 8, later 9 - but only the later one follows "4 5"
    assert lookup([5, 8, 0, 4, 5, 9, 0, 4, 5], depth=1) == [9]


def test_lookup_prefers_the_frequent_continuation_among_equal_matches() -> None:
    assert lookup([5, 8, 1, 5, 9, 2, 5, 9, 3, 5], depth=1) == [9]


def test_lookup_takes_the_latest_of_equal_continuations() -> None:
    assert lookup([5, 8, 1, 5, 9, 2, 5], depth=1) == [9]


def test_lookup_goes_on_into_its_own_draft() -> None:
    assert lookup([1, 2, 1, 2, 1, 2], depth=6) == [1, 2, 1, 2, 1, 2]


def test_lookup_length_follows_the_evidence() -> None:
    weak = lookup([5, 8, 7, 6, 4, 3, 5], depth=12)
    strong = lookup([*range(10, 40), 0, *range(10, 22)], depth=12)
    assert 0 < len(weak) < len(strong) == 12


def test_lookup_branches_where_trees_are_of_use() -> None:
    drafter, context = PromptLookupDrafter(), context_of([5, 8, 1, 5, 9, 2, 5])
    drafter.start(context)
    draft = drafter.propose(context, budget(4, trees=True))
    assert {draft.tokens[0][child] for child in draft.children[0][0]} == {8, 9}
    assert drafter.propose(context, budget(4, trees=False)).is_chain


def test_lookup_grows_its_index_with_the_text() -> None:
    drafter, context = PromptLookupDrafter(), context_of([1, 2, 3, 4])
    drafter.start(context)
    assert drafter.propose(context, budget(3)).is_empty
    context.tokens[0] += [7, 1, 2]
    assert drafter.propose(context, budget(3, trees=False)).tokens[0] == [2, 3, 4, 7]


def test_lookup_confidence_is_a_probability_and_grows_with_the_match() -> None:
    drafter, context = PromptLookupDrafter(), context_of([*range(10, 30), 0, *range(10, 20)])
    drafter.start(context)
    strong = drafter.propose(context, budget(5)).confidence[0][1:]
    drafter, context = PromptLookupDrafter(), context_of([5, 8, 7, 5])
    drafter.start(context)
    weak = drafter.propose(context, budget(5)).confidence[0][1:]
    assert all(0.0 < value <= 1.0 for value in (*strong, *weak))
    assert weak[0] < strong[0]


@pytest.mark.parametrize("size", [3, 8])
def test_index_matches_are_those_of_a_search_by_hand(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    text = torch.randint(0, size, (120,), generator=generator).tolist()
    index = SuffixIndex(1, 6)
    index.extend(text)

    def match_length(position: int) -> int:
        length = 0
        while length < min(6, position) and text[position - 1 - length] == text[-1 - length]:
            length += 1
        return length

    by_hand = {position: match_length(position) for position in range(1, len(text)) if match_length(position)}
    found = dict(index.matches())
    assert found
    assert all(by_hand[position] == length for position, length in found.items())
    assert max(found.values()) == max(by_hand.values())


class Counting:
    """Counts the tokens that pass through a model."""

    def __init__(self, model: Any) -> None:
        self.widths: list[int] = []
        self.handle = watching_hook(
            model, lambda module, args, kwargs: self.widths.append(kwargs["input_ids"].shape[1]), before=True
        )

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *args: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("same", [True, False])
def test_the_draft_model_reads_every_token_once(same: bool) -> None:
    """Its cache is kept aligned: after the prompt it sees new tokens only, and a few again after a rejection."""
    model = model_of("llama")
    draft = model_of("llama", dtype=torch.float32) if same else model_of("llama", num_hidden_layers=2)
    hf_specdec.target.selftest.support(draft)
    with Counting(draft) as counted:
        stats = assert_same(
            model,
            prompt(),
            {
                "speculative_mode": "assistant",
                "assistant_model": draft,
                "speculative_config": {"num_draft_tokens": 4},
            },
            max_new_tokens=21,
            eos_token_id=None,
        )
    if same:
        assert stats.mean_acceptance_length == 5.0
    assert counted.widths[0] == 13, "the prompt and the token that its forward brought"
    assert max(counted.widths[1:]) <= 2


def test_draft_and_target_agree_fully_when_they_are_one_model() -> None:
    model = model_of("llama")
    for do_sample in (False, True):
        stats = assert_same(
            model,
            prompt(2, padding=2),
            {"speculative_mode": "assistant", "assistant_model": model, "speculative_config": {"num_draft_tokens": 3}},
            max_new_tokens=21,
            eos_token_id=None,
            do_sample=do_sample,
            temperature=0.9 if do_sample else None,
            top_p=0.9 if do_sample else None,
        )
        assert stats.acceptance_rate == 1.0
        assert stats.rounds == 5


def test_reading_the_tape_accepts_more_than_drafting_greedily() -> None:
    """Coupling with the target's noise is what the tape is for (arXiv:2408.07978)."""
    model, draft = model_of("llama", num_hidden_layers=3), model_of("llama", num_hidden_layers=2)
    accepted = {}
    for how in ("tape", "greedy"):
        with hf_specdec.record() as stats:
            for seed in range(8):
                run(
                    model,
                    prompt(),
                    seed=seed,
                    max_new_tokens=40,
                    eos_token_id=None,
                    do_sample=True,
                    temperature=3.0,
                    top_k=0,
                    speculative_mode="assistant",
                    assistant_model=draft,
                    speculative_config={"num_draft_tokens": 3, "draft_sampling": how},
                )
        accepted[how] = stats.acceptance_rate
    assert accepted["tape"] > 2 * accepted["greedy"]


def test_the_assistant_stops_when_it_no_longer_pays() -> None:
    drafter = AssistantDrafter(model_of("llama", num_hidden_layers=2))
    context = context_of([5, 6, 7, 8])
    drafter.start(context)
    asked: list[list[list[float]]] = []

    def pays(chains: Any) -> bool:
        asked.append([list(chain) for chain in chains])
        return len(asked) < 3

    draft = drafter.propose(context, Budget(depth=[9], room=[9], nodes=9, trees=False, pays=pays))
    assert len(draft.tokens[0]) == 1 + 3
    assert [len(chains[0]) for chains in asked] == [1, 2, 3]
    assert all(0.0 < confidence <= 1.0 for confidence in asked[-1][0])


def test_get_candidates_is_for_one_row() -> None:
    with pytest.raises(ValueError, match="one row"):
        PromptLookupDrafter().get_candidates(torch.ones(2, 3, dtype=torch.long))
