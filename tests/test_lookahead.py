"""The Jacobi window, its mask, its n-grams, and when it rides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import assert_same, model_of, prompt, run

import hf_specdec
from hf_specdec.draft import Budget
from hf_specdec.drafters.lookahead import LookaheadDrafter, NgramPool, Window, WindowGain
from hf_specdec.errors import InvalidSettingError
from hf_specdec.tree import TreeBuilder


def following(token: int) -> int:
    """A language in which every token says what comes next."""
    return (7 * token + 3) % 97


def ridden(window: Window, text: list[int], width: int) -> TreeBuilder:
    """A tree that holds the window alone."""
    tree = TreeBuilder(text[-1])
    window.ride(tree, text, width)
    assert tree.passenger == [False] + [True] * (len(tree) - 1)
    return tree


def grown(pool: NgramPool, text: list[int], **limits: int) -> TreeBuilder:
    """A tree of what the pool knows."""
    tree = TreeBuilder(text[-1])
    pool.grow(tree, text, **limits)
    return tree


def full_window(width: int, ngram_size: int, text: list[int], rounds: int = 12) -> Window:
    """A window after so many rounds, each of which committed one token of the language."""
    window = Window(ngram_size, seed=0)
    for _ in range(rounds):
        node_tokens = ridden(window, text, width).tokens
        last = window.last_level(list(range(1, len(node_tokens))))
        window.advance(text, [following(node_tokens[node]) for node in last], passed=1)
        text.append(following(text[-1]))
    return window


def test_the_mask_of_a_small_window_is_the_drawing() -> None:
    """W = 3, N = 4, one n-gram of the pool, behind a past of some tokens."""
    drawing = """
              past  R g1 g2 g3 a1 a2 b0 b1 b2 c0 c1 c2
        R       x   x  .  .  .  .  .  .  .  .  .  .  .
        g1      x   x  x  .  .  .  .  .  .  .  .  .  .
        g2      x   x  x  x  .  .  .  .  .  .  .  .  .
        g3      x   x  x  x  x  .  .  .  .  .  .  .  .
        a1      x   x  .  .  .  x  .  .  .  .  .  .  .
        a2      x   x  .  .  .  x  x  .  .  .  .  .  .
        b0      x   x  .  .  .  .  .  x  .  .  .  .  .
        b1      x   x  .  .  .  x  .  .  x  .  .  .  .
        b2      x   x  .  .  .  x  x  .  .  x  .  .  .
        c0      x   x  .  .  .  .  .  x  .  .  x  .  .
        c1      x   x  .  .  .  x  .  .  x  .  .  x  .
        c2      x   x  .  .  .  x  x  .  .  x  .  .  x
    """
    lines = [line.split() for line in drawing.strip().splitlines()][1:]
    expected = torch.tensor([[mark == "x" for mark in line[1:]] for line in lines])  # [12, past + 12]
    depth_of = [0, 1, 2, 3, 1, 2, 1, 2, 3, 2, 3, 4]

    model = copy.deepcopy(model_of("llama"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if kwargs["input_ids"].shape[1] == 12 and mask is not None and mask.dim() == 4:  # not the prompt
            seen.append((kwargs["attention_mask"], kwargs["position_ids"]))

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        asked = {"window_size": 3, "ngram_size": 4, "guess_set_size": 1, "num_draft_tokens": 3}
        run(
            model,
            prompt(repeat=True),
            max_new_tokens=60,
            eos_token_id=None,
            speculative_mode="lookahead",
            speculative_config=asked,
        )
    finally:
        hook.remove()
    assert seen, "no round had a full window and a whole n-gram"
    for mask, positions in seen:
        assert mask.shape[:3] == (1, 1, 12)
        past = mask.shape[3] - 12
        assert mask[0, 0, :, :past].all()
        assert torch.equal(mask[0, 0, :, past:], expected[:, 1:])
        assert (positions[0] - positions[0, 0]).tolist() == depth_of


def test_window_columns_become_the_models_own_ngrams() -> None:
    text = [5, 11, 40]
    window = full_window(width=4, ngram_size=4, text=text)
    tree = ridden(window, text, 4)
    tokens, parents = tree.tokens[1:], tree.parents[1:]
    assert (len(tokens), parents) == (11, [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7])
    node_tokens = [text[-1], *tokens]
    guesses = [following(node_tokens[node]) for node in window.last_level(list(range(1, 12)))]
    ngrams = window.advance(text, guesses, passed=1)
    assert len(ngrams) == 4
    for column, (ngram, before) in enumerate(ngrams):
        assert len(ngram) == 4
        # the root is what came true, and may not be what its column was guessed from
        start = 1 if column == 0 else 0
        assert list(ngram[start + 1 :]) == [following(token) for token in ngram[start:-1]]
        assert before[-1] == ([*text[:-1], text[-1], *node_tokens[1:4]])[len(text) - 2 + column]
    assert ngrams[0][0][0] == text[-1]


def test_a_window_moves_on_by_what_was_committed() -> None:
    window = Window(ngram_size=3, seed=0)
    text = [3, 4]
    ridden(window, text, 5)
    window.levels = [[4, 10, 11, 12, 13], [20, 21, 22, 23, 24]]
    # level l, column i lies l + i places after the root; the root moves on by three places
    assert len(window.advance(text, [30, 31, 32, 33, 34], passed=3)) == 5
    assert window.levels == [[22, 23, 24], [32, 33, 34]]
    ridden(window, [3, 4, 9, 9, 9], 5)
    assert [level[:3] for level in window.levels] == [[9, 23, 24], [32, 33, 34]]
    assert [len(level) for level in window.levels] == [5, 5]


def test_a_window_of_one_column_guesses_too() -> None:
    text = [5, 11, 40]
    window = full_window(width=1, ngram_size=3, text=text)
    ridden(window, text, 1)
    ((ngram, before),) = window.advance(text, [following(window.levels[-1][0])], passed=1)
    assert ngram[0] == text[-1]
    assert ngram[2] == following(ngram[1])
    assert list(before) == text[-9:-1]


def test_pool_keeps_the_latest_ngrams_of_a_first_token() -> None:
    pool = NgramPool(ngram_size=3, most=2)
    for middle in (10, 11, 12):
        pool.add((5, middle, 20), before=())
    pool.add((6, 1, 2), before=())
    assert grown(pool, [5], depth=2, nodes=9, branches=9).tokens[1:] == [12, 11, 20, 20]
    pool.add((5, 11, 20), before=())  # seen again
    pool.add((5, 13, 20), before=())
    assert grown(pool, [5], depth=1, nodes=9, branches=9).tokens[1:] == [13, 11]


def test_ngrams_that_fit_the_text_before_come_first_and_share_their_prefix() -> None:
    pool = NgramPool(ngram_size=4, most=8)
    pool.add((5, 1, 2, 3), before=(8, 9))
    pool.add((5, 1, 2, 4), before=(7, 9))
    pool.add((5, 6, 6, 6), before=(0, 0))
    # matches of 3, 2 and 1 tokens weigh 64, 16 and 4: 1 - 2 - {3, 4}, and 6 is too improbable to follow
    tree = grown(pool, [8, 9, 5], depth=3, nodes=9, branches=9)
    tokens, parents, confidence = tree.tokens[1:], tree.parents[1:], tree.confidence[1:]
    assert tokens == [1, 2, 3, 4]
    assert parents == [0, 1, 2, 2]
    # shares of the votes, times the trust in matches of 3, 4, 5 and 4 tokens
    assert confidence == pytest.approx([80 / 84 * 0.5, 0.6, 64 / 80 * 0.7, 16 / 80 * 0.6])
    # without a fitting text before, all three are as good
    assert set(grown(pool, [0, 5], depth=1, nodes=9, branches=9).tokens[1:]) == {1, 6}


def test_pool_learns_the_prompt_and_the_output() -> None:
    pool = NgramPool(ngram_size=3, most=4)
    text = [1, 2, 3, 1]
    pool.read(text)
    assert grown(pool, text, depth=2, nodes=4, branches=2).tokens[1:] == [2, 3]
    text += [9, 9, 1]
    pool.read(text)
    assert set(grown(pool, text, depth=1, nodes=4, branches=2).tokens[1:]) == {2, 9}
    assert pool.reach_of_text(1, [9, 9]) == 2
    assert pool.reach_of_text(1, [9, 8]) == 1
    pool.add((1, 7, 7), before=())
    assert pool.reach_of_text(1, [7, 7]) == 0  # a guess of the window is not the text's


def test_sampling_windows_read_the_noise_of_the_target() -> None:
    """Where the scores do not depend on the text, the noise alone decides: the window knows the future."""
    model = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        model.model.norm.weight.zero_()
    lengths = {}
    for width in (0, 5):
        asked = {"window_size": width, "ngram_size": 4, "num_draft_tokens": 8}
        stats = assert_same(
            model,
            prompt(2, padding=3),
            {"speculative_mode": "lookahead", "speculative_config": asked},
            max_new_tokens=40,
            do_sample=True,
            eos_token_id=None,
        )
        lengths[width] = stats.mean_acceptance_length
    assert lengths[0] < 1.2
    assert lengths[5] > 1.7


def test_passengers_are_never_accepted() -> None:
    """The language model is a constant, and so is the window: every passenger is right, and yet none is taken."""

    class Riding(hf_specdec.Drafter):
        def propose(self, context: Any, budget: Budget) -> Any:
            chains = [[text[-1], text[-1], text[-1]] for text in context.tokens]
            return hf_specdec.Draft(
                tokens=chains,
                parents=[[-1, 0, 1]] * len(chains),
                passenger=[[False, True, True]] * len(chains),
            )

    model = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        model.model.norm.weight.zero_()
    stats = assert_same(model, prompt(), {"speculative_mode": Riding()}, max_new_tokens=20, eos_token_id=None)
    assert stats.rounds == 19
    assert stats.widths[3] > 10


@pytest.mark.parametrize(("window", "levels"), [(4, 2), (3, 4)])
def test_window_adds_its_nodes_to_the_forward(window: int, levels: int) -> None:
    stats = assert_same(
        model_of("llama"),
        prompt(),
        {
            "speculative_mode": "lookahead",
            "speculative_config": {"window_size": window, "ngram_size": levels + 1, "num_draft_tokens": 2},
        },
        max_new_tokens=60,
        eos_token_id=None,
    )
    full = levels * window
    assert stats.widths[full] + stats.widths[full + 1] + stats.widths[full + 2] > 10
    assert max(stats.widths) <= full + 2


def test_auto_takes_no_window_where_forwards_are_dear() -> None:
    drafter = LookaheadDrafter()
    gain = WindowGain(ngram_size=5)

    def budget(cost: Any) -> Budget:
        return Budget(depth=[9], room=[9], nodes=9, trees=True, pays=lambda chains: True, cost=cost)

    assert gain.best_width(budget(lambda nodes: 1.0 + 0.1 * nodes)) == 0
    assert gain.best_width(budget(lambda nodes: 1.0)) == 20
    assert 0 < gain.best_width(budget(lambda nodes: 1.0 if nodes < 40 else 3.0)) < 10
    assert gain.best_width(budget(None)) == 5
    assert drafter._window_width(budget(lambda nodes: 1.0 + 0.1 * nodes)) == 0


def test_a_window_that_adds_nothing_is_given_up() -> None:
    gain = WindowGain(ngram_size=3)

    def cost(nodes: int) -> float:
        return 1.0 + nodes / 200

    assert gain.pays(5, cost)
    for _ in range(60):
        gain.observe(committed=1, gained=0)
    assert not gain.pays(5, cost)
    for _ in range(60):
        gain.observe(committed=2, gained=1)
    assert gain.pays(5, cost)


@pytest.mark.parametrize(
    "settings",
    [{"window_size": -1}, {"window_size": "wide"}, {"ngram_size": 1}, {"guess_set_size": 0}, {"window": 3}],
)
def test_bad_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=next(iter(settings))):
        run(model_of("llama"), prompt(), speculative_mode="lookahead", speculative_config=settings)


def test_models_that_take_chains_only_get_no_window() -> None:
    stats = assert_same(
        model_of("falcon_alibi"),
        prompt(repeat=True),
        {"speculative_mode": "lookahead", "speculative_config": {"window_size": 4, "num_draft_tokens": 3}},
        max_new_tokens=30,
    )
    assert max(stats.widths) <= 4


def test_is_exported() -> None:
    assert hf_specdec.LookaheadDrafter is LookaheadDrafter
    assert "lookahead" in hf_specdec.mode_names()
