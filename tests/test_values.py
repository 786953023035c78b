"""Trees, drafts, statistics, settings: the values of a round."""

from __future__ import annotations

from collections import Counter

import pytest

import hf_specdec
from hf_specdec import AssistantConfig, Draft, PromptLookupConfig, SpeculationStats, TreeBuilder, Verdict, tree
from hf_specdec.decoding.stats import RowStats, publish
from hf_specdec.errors import DraftError, InvalidSettingError

#        0
#       / \
#      1   2
#     /   / \
#    3   4   5
PARENTS = [-1, 0, 0, 1, 2, 2]


def test_topology() -> None:
    assert tree.depths(PARENTS) == [0, 1, 1, 2, 2, 2]
    assert tree.children(PARENTS) == [[1, 2], [3], [4, 5], [], [], []]
    assert [[j for j, seen in enumerate(row) if seen] for row in tree.ancestors(PARENTS)] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 2, 4],
        [0, 2, 5],
    ]
    assert tree.is_chain([-1, 0, 1]) and not tree.is_chain(PARENTS)  # noqa: PT018


def test_best_first_growth() -> None:
    # path probabilities by hand: 1, .5, .4, .05, .36, .04
    probabilities = [1.0, 0.5, 0.4, 0.1, 0.9, 0.1]
    assert tree.path_probabilities(PARENTS, probabilities) == pytest.approx([1.0, 0.5, 0.4, 0.05, 0.36, 0.04])
    order = tree.best_first(PARENTS, probabilities)
    assert order == [0, 1, 2, 4, 3, 5]
    for size in range(1, len(order) + 1):
        kept = sorted(order[:size])
        tree.check(tree.subtree(PARENTS, kept))


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, 0, 3], [-1, -1]])
def test_malformed_trees(parents: list[int]) -> None:
    with pytest.raises(DraftError):
        tree.check(parents)


def test_draft_keeps_part_of_itself() -> None:
    draft = Draft([[9, 1, 2, 3, 4, 5]], [PARENTS], confidence=[[1.0, 0.5, 0.4, 0.1, 0.9, 0.1]])
    part = draft.keep([[0, 2, 5]])
    assert part.tokens == [[9, 2, 5]]
    assert part.parents == [[-1, 0, 1]]
    assert part.confidence == [[1.0, 0.4, 0.1]]
    assert draft.keep([[0, 1, 2, 3, 4, 5]]) is draft


def test_best_chain_follows_confidence() -> None:
    draft = Draft([[9, 1, 2, 3, 4, 5]], [PARENTS], confidence=[[1.0, 0.5, 0.6, 0.1, 0.2, 0.3]])
    assert draft.best_chain().tokens == [[9, 2, 5]]


def test_draft_checks_its_shape() -> None:
    with pytest.raises(DraftError, match="parents"):
        Draft([[1, 2]], [[-1]])
    with pytest.raises(DraftError, match="confidence"):
        Draft([[1, 2]], [[-1, 0]], confidence=[[1.0]])
    with pytest.raises(DraftError, match="2 rows of tokens but 1 rows"):
        Draft([[1], [2]], [[-1]])


def test_statistics_of_a_round_by_hand() -> None:
    stats = SpeculationStats(mode="m", calls=1, prompt_forwards=1, rows=[RowStats(), RowStats()])
    draft = Draft([[9, 1, 2, 3, 4, 5], [9]], [PARENTS, [-1]])
    # row 0 accepts 2 and 5 and gets a bonus; row 1 takes a plain step
    stats.record_round(draft, Verdict(kept=[[0, 2, 5], [0]], committed=[[2, 5, 8], [7]], accepted=[2, 0]))
    # row 0 takes a plain step, row 1 has finished
    stats.record_round(Draft.empty([8, 7]), Verdict(kept=[[0], []], committed=[[6], []], accepted=[0, 0]))
    assert stats.target_forwards == 3
    assert stats.rows[0].tokens == 4
    assert stats.rows[0].mean_acceptance_length == 2.0
    assert stats.rows[1].mean_acceptance_length == 1.0
    assert stats.mean_acceptance_length == pytest.approx(5 / 3)
    assert stats.histogram == Counter({2: 1, 0: 2})
    assert stats.acceptance_rate == pytest.approx(2 / 5)
    assert stats.acceptance_by_depth() == {1: 1.0, 2: 1.0}
    assert stats.widths == {6: 1, 1: 1}


def test_record_adds_calls_up_and_nests() -> None:
    one = SpeculationStats(mode="a", calls=1, rounds=2, rows=[RowStats(tokens=3, rounds=2, accepted=1)])
    with hf_specdec.record() as outer:
        publish(one)
        with hf_specdec.record() as inner:
            publish(SpeculationStats(mode="b", calls=1, rounds=1, rows=[RowStats(tokens=1, rounds=1)], lossless=False))
    publish(one)
    assert (outer.calls, outer.rounds, outer.tokens, outer.mode, outer.lossless) == (2, 3, 4, "mixed", False)
    assert (inner.calls, inner.mode) == (1, "b")
    assert outer.mean_acceptance_length == pytest.approx(4 / 3)
    assert outer.summary()["tokens"] == 4


def test_plain_decoding_has_a_mean_acceptance_length_of_one() -> None:
    assert SpeculationStats().mean_acceptance_length == 1.0
    assert RowStats(tokens=5, rounds=4).mean_acceptance_length == 1.0


def test_configs_say_what_differs_from_their_defaults() -> None:
    assert PromptLookupConfig().to_dict() == {}
    config = AssistantConfig(num_draft_tokens=3, draft_sampling="greedy")
    assert config.to_dict() == {"num_draft_tokens": 3, "draft_sampling": "greedy"}
    assert AssistantConfig(**config.to_dict()) == config
    with pytest.raises(InvalidSettingError, match="max_match_length must be at least 5"):
        PromptLookupConfig(min_match_length=5, max_match_length=4)


def grown(nodes: list[tuple[int, int, float]]) -> TreeBuilder:
    """A tree of (parent, token, confidence) below the root 7."""
    tree = TreeBuilder(7)
    for parent, token, confidence in nodes:
        tree.add(parent, token, confidence)
    return tree


def test_a_merged_tree_holds_the_paths_of_both() -> None:
    merged = grown([(0, 1, 0.5), (1, 2, 0.4), (0, 3, 0.2)])
    merged.merge(grown([(0, 3, 0.5), (0, 1, 0.1), (2, 2, 0.3), (2, 9, 0.6), (1, 4, 0.9)]))
    tree.check(merged.parents)
    found = {tuple(merged.path(node)): merged.confidence[node] for node in range(1, len(merged))}
    expected = {(1,): 0.55, (1, 2): 0.58, (3,): 0.6, (1, 9): 0.6, (3, 4): 0.9}
    assert found == pytest.approx(expected)
    best = merged.best(3)
    # the most probable: (3), (1) and (3, 4), of 0.6, 0.55 and 0.54
    assert {tuple(best.path(node)) for node in range(1, len(best))} == {(1,), (3,), (3, 4)}
    assert best.reached == pytest.approx([1.0, *(merged.reached[node] for node in (1, 3, 5))])
    assert Draft.of([best]).width == 4


def test_a_builder_follows_its_best_path() -> None:
    built = grown([(0, 1, 0.5), (1, 2, 0.4), (0, 3, 0.9), (3, 4, 0.3)])
    assert built.path(4) == [3, 4]
    assert built.best_path() == [0.9, 0.3]  # 0.27 against 0.2
    assert built.best(9) is built
    assert TreeBuilder(7).best_path() == []
