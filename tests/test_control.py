"""The controller: measured costs, calibrated drafts, the ratio rule."""

from __future__ import annotations

import pytest

from hf_specdec import Draft, Verdict
from hf_specdec.decoding.control import AdaptiveController, FixedController
from hf_specdec.decoding.cost import CostModel
from hf_specdec.decoding.experience import Calibrator, Experience, experience_of

# seconds of a forward over so many nodes, a staircase as it was once measured on two cores
STAIRS = {1: 1.0, 2: 1.09, 3: 1.16, 4: 1.5, 5: 1.55, 6: 1.6, 7: 1.72, 8: 1.85, 9: 2.4, 10: 2.4}


def measured(costs: dict[int, float] = STAIRS, batch: int = 1) -> Experience:
    model = CostModel("cpu")
    for width, seconds in costs.items():
        for _ in range(3):
            model.observe(batch, width, seconds)
    return Experience(model)


def chain(confidence: list[float], rows: int = 1) -> Draft:
    return Draft.chains([0] * rows, [list(range(1, len(confidence) + 1))] * rows, [confidence] * rows)


class Believing(AdaptiveController):
    """Takes confidences at their word, so that sizes can be computed by hand."""

    def __init__(self, experience: Experience, most_tokens: int = 9) -> None:
        super().__init__(experience, most_tokens)
        self.calibrator.probability = lambda confidence: confidence  # type: ignore[method-assign]


def best_by_hand(confidence: list[float], costs: dict[int, float], rows: int = 1) -> int:
    best, best_rate = 0, rows / costs[1] * 1.1
    expected, reached = 1.0, 1.0
    for nodes, p in enumerate(confidence, start=1):
        reached *= p
        expected += reached
        if rows * expected / costs[nodes + 1] > best_rate:
            best, best_rate = nodes, rows * expected / costs[nodes + 1]
    return best


@pytest.mark.parametrize("p", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_the_size_is_the_argmax_of_tokens_per_second(p: float) -> None:
    confidence = [p] * 9
    sized = Believing(measured()).size(chain(confidence), [True], most_nodes=9)
    assert sized.width - 1 == best_by_hand(confidence, STAIRS)


def test_zero_is_a_size() -> None:
    assert Believing(measured()).size(chain([0.02] * 4), [True], most_nodes=9).is_empty


def test_a_step_of_the_staircase_is_taken_when_what_follows_pays() -> None:
    """From 3 to 4 nodes costs more than one token is worth, from 3 to 8 does not."""
    assert Believing(measured()).size(chain([0.9] * 9), [True], most_nodes=9).width == 8


def test_the_best_nodes_of_a_tree_are_kept() -> None:
    draft = Draft([[0, 1, 2, 3]], [[-1, 0, 0, 2]], confidence=[[1.0, 0.05, 0.9, 0.8]])
    sized = Believing(measured({1: 1.0, 2: 1.05, 3: 1.1, 4: 3.0})).size(draft, [True], most_nodes=9)
    assert sized.tokens == [[0, 2, 3]]


def test_the_cache_may_set_the_limit() -> None:
    assert Believing(measured()).size(chain([0.99] * 9), [True], most_nodes=2).width == 3


def test_finished_rows_are_not_paid_for() -> None:
    sized = Believing(measured(batch=1)).size(chain([0.9] * 3, rows=2), [True, False], most_nodes=9)
    assert [len(row) for row in sized.tokens] == [3, 1]


def test_costs_are_scaled_from_the_nearest_width_until_measured() -> None:
    costs = CostModel("cpu")
    prior = costs.seconds(1, 8)
    assert 1.0 < prior < 4.0
    for _ in range(3):
        costs.observe(1, 8, 0.5)
    assert costs.seconds(1, 8) == 0.5
    assert costs.seconds(1, 1) == pytest.approx(0.5 / prior)
    assert costs.seconds(1, 64) > costs.seconds(1, 32) > 0.5


def test_one_slow_forward_does_not_decide() -> None:
    costs = measured({1: 1.0, 2: 1.1}).costs
    costs.observe(1, 2, 50.0)
    assert costs.seconds(1, 2) == pytest.approx(1.1)


def test_calibration_moves_from_the_drafters_word_to_what_was_seen() -> None:
    calibrator = Calibrator()
    assert calibrator.probability(0.92) == pytest.approx(0.92)
    for _ in range(50):
        calibrator.observe(0.92, False)
    assert calibrator.probability(0.92) < 0.1
    assert calibrator.probability(0.3) == pytest.approx(0.3), "other confidences are judged by their own"
    for _ in range(300):
        calibrator.observe(0.92, True)
    assert calibrator.probability(0.92) > 0.8, "old observations fade"


def test_what_was_not_verified_is_learned_from_too() -> None:
    """The proposal said 1, 2, 3; only its first token was verified, but the text went on 1, 2, 9."""
    controller = AdaptiveController(measured(), 9)
    proposal = chain([0.31, 0.51, 0.71])
    verdict = Verdict(kept=[[0, 1]], committed=[[1, 2, 9]], accepted=[1])
    before = [controller.calibrator.probability(c) for c in (0.31, 0.51, 0.71)]
    controller.observe(proposal, chain([0.31]), verdict, 0.0, 1.0)
    after = [controller.calibrator.probability(c) for c in (0.31, 0.51, 0.71)]
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] < before[2]


def paying(controller: AdaptiveController, draft_seconds: float, right: bool, rounds: int) -> list[int]:
    """Depths that the controller grants a drafter which drafts two tokens a round, all right or all wrong."""
    granted = []
    for _ in range(rounds):
        budget = controller.budget([9], trees=False)
        granted.append(0 if budget.free_only else budget.depth[0])
        draft = chain([0.6, 0.6]) if granted[-1] else Draft.empty([0])
        committed = [1, 2, 9] if right and granted[-1] else [9]
        verdict = Verdict(kept=[[0]], committed=[committed], accepted=[len(committed) - 1])
        controller.observe(draft, draft, verdict, draft_seconds if granted[-1] else 0.0, STAIRS[draft.width])
    return granted


def test_costly_drafts_that_fail_are_given_up_and_tried_again() -> None:
    experience = measured()
    granted = paying(AdaptiveController(experience, 9), draft_seconds=0.6, right=False, rounds=80)
    assert granted[0] == 9
    assert granted.count(0) > 65
    assert 2 in granted[20:], "after a pause a short draft is tried"
    later = paying(AdaptiveController(experience, 9), draft_seconds=0.6, right=False, rounds=30)
    assert later.count(0) >= 29, "the next call does not start anew"


def test_what_is_free_is_still_asked_for_and_decides_nothing_about_the_rest() -> None:
    experience = measured()
    controller = AdaptiveController(experience, 9)
    paying(controller, draft_seconds=0.6, right=False, rounds=40)
    while not (budget := controller.budget([9], trees=False)).free_only:
        paying(controller, draft_seconds=0.6, right=False, rounds=1)
    assert budget.depth == [9]
    assert budget.nodes == 9
    known = experience.acceptance, experience.gain, experience.draft_seconds, experience.drafting
    draft = chain([0.9] * 4)
    seen = controller.calibrator.observations
    controller.observe(draft, draft, Verdict([[0]], [[1, 2, 3, 4, 9]], [4]), 0.0, STAIRS[5])
    assert (experience.acceptance, experience.gain, experience.draft_seconds, experience.drafting) == known
    assert controller.calibrator.observations > seen


def gaining(often: int, rounds: int = 60, drafting: float = 0.06) -> int:
    """Rounds in which drafting is asked for, when every `often`th draft is good, and the others say they are not."""
    controller = Believing(measured({1: 1.0, **dict.fromkeys(range(2, 11), 1.7)}))
    asked = 0
    for turn in range(rounds):
        good = turn % often == 0
        budget = controller.budget([9], trees=False)
        asked += not budget.free_only
        proposal = Draft.empty([0]) if budget.free_only else chain([0.98 if good else 0.02] * 2)
        verified = controller.size(proposal, [True], most_nodes=9)
        assert verified.is_empty == (not good or budget.free_only)
        committed = [1, 2, 9] if good and not budget.free_only else [9]
        verdict = Verdict([[0]], [committed], [len(committed) - 1])
        seconds = 0.0 if budget.free_only else drafting
        controller.observe(proposal, verified, verdict, seconds, 1.0 if verified.is_empty else 1.7)
    return asked


def test_a_few_good_drafts_pay_for_the_others() -> None:
    """Most drafts are not worth verifying, but cost little: what counts is what those that are verified bring."""
    assert gaining(often=4) == 60
    assert gaining(often=1000) < 30
    assert gaining(often=1000, drafting=0.015) == 60, "what costs next to nothing is never given up"


def test_what_is_promised_is_weighed_against_all_that_it_costs() -> None:
    controller = Believing(measured({1: 1.0, 2: 1.5, 3: 1.7}))
    draft = chain([0.9, 0.5])
    controller.observe(draft, draft, Verdict([[0]], [[1, 9]], [1]), 0.1, 1.7)
    assert controller.experience.gain == pytest.approx(0.1 * (0.9 + 0.45 - 0.1 - 0.7))
    assert controller.experience.drafting == pytest.approx(0.1)


def test_costly_drafts_that_hold_are_kept() -> None:
    assert 0 not in paying(AdaptiveController(measured(), 9), draft_seconds=0.3, right=True, rounds=60)


def test_a_drafter_is_asked_to_go_on_while_that_pays() -> None:
    controller = Believing(measured())
    pays = controller.budget([9], trees=False).pays
    assert pays([[0.95]])
    assert pays([[0.95, 0.9, 0.9]])
    assert not pays([[0.95, 0.02]])
    assert not pays([[0.03]])


def test_fixed_sizes() -> None:
    controller = FixedController(2)
    budget = controller.budget([9, 1, -1], trees=True)
    assert budget.depth == [2, 1, 0]
    assert budget.room == [9, 1, 0]
    assert controller.size(chain([0.9] * 5), [True], most_nodes=9).width == 3
    assert controller.size(chain([0.9] * 5), [True], most_nodes=1).width == 2


def with_passengers(drafted: int, riding: int, confidence: float = 0.9) -> Draft:
    """A chain, and a chain of passengers beside it."""
    return Draft(
        tokens=[[1, *range(2, 2 + drafted), *range(50, 50 + riding)]],
        parents=[[-1, *range(drafted), *([0, *range(drafted + 1, drafted + riding)] if riding else [])]],
        confidence=[[1.0] + [confidence] * drafted + [0.0] * riding],
        passenger=[[False] * (1 + drafted) + [True] * riding],
    )


def test_a_width_measured_in_a_bad_moment_is_tried_again() -> None:
    """It looked too dear, so it is not verified, so it is not measured: what is known of it must fade."""
    experience = measured({1: 1.0})
    for width in range(2, 6):
        experience.costs.observe(1, width, 60.0)
    controller = AdaptiveController(experience, 4)
    certain = chain([0.95] * 4)
    assert controller.size(certain, [True], most_nodes=9).width == 1
    for _ in range(CostModel.MEMORY):
        experience.costs.observe(1, 1, 1.0)
    assert controller.size(certain, [True], most_nodes=9).width == 5


@pytest.mark.parametrize("adaptive", [False, True])
def test_passengers_ride_all_or_none(adaptive: bool) -> None:
    controller = AdaptiveController(measured(dict.fromkeys(range(1, 12), 1.0)), 4) if adaptive else FixedController(4)
    for drafted in (0, 3):
        whole = with_passengers(drafted, 5)
        assert controller.size(whole, [True], most_nodes=9).tokens == whole.tokens
        squeezed = controller.size(whole, [True], most_nodes=4)
        assert squeezed.tokens == [whole.tokens[0][: 1 + drafted]]
        assert not any(squeezed.passenger[0])
    cut = controller.size(with_passengers(3, 5), [True], most_nodes=6)
    assert cut.tokens == [[1, 2, 50, 51, 52, 53, 54]]
    assert cut.parents == [[-1, 0, 0, 2, 3, 4, 5]]


def test_passengers_count_in_the_cost_of_what_is_drafted() -> None:
    """One drafted node costs a step of the staircase alone, and nothing where passengers have climbed it already."""
    costs = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    controller = AdaptiveController(measured(costs), 4)
    assert controller.size(with_passengers(1, 0, 0.6), [True], most_nodes=9).width == 1
    assert controller.size(with_passengers(1, 2, 0.6), [True], most_nodes=9).width == 4


def test_experience_is_kept_per_model_and_mode_and_fades() -> None:
    from hf_specdec.testing import tiny_model

    model, other = tiny_model(), tiny_model()
    mine = experience_of(model, "a")
    assert experience_of(model, "a") is mine
    assert experience_of(model, "b") is not mine
    # some modes verify with a part of the model, so a forward costs something else there
    assert experience_of(model, "b").costs is not mine.costs
    assert experience_of(other, "a").costs is not mine.costs
    for _ in range(90):
        mine.calibrator.observe(0.92, False)
    low = mine.calibrator.probability(0.92)
    AdaptiveController(mine, 4)  # a new call begins
    assert low < mine.calibrator.probability(0.92) < 0.5
    assert mine.calibrator.observations == pytest.approx(Experience.KEPT)
