"""The speed-up formulas: known values, edges, agreement with each other, and every error."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest

from hf_specdec import analysis
from hf_specdec.errors import AnalysisError

NAN, INF = math.nan, math.inf
ALPHAS = [0.0, 1e-12, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1 - 1e-9, 1 - 1e-12, math.nextafter(1, 0), 1.0]
GAMMAS = [0, 1, 2, 3, 4, 5, 8, 16, 64]
COSTS = [0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 1.0, 3.0]


def exact_tokens(alpha: float, gamma: int) -> Fraction:
    """E in rational arithmetic, as the sum it stands for."""
    return sum((Fraction(alpha) ** i for i in range(gamma + 1)), Fraction(0))


def exact_best_length(alpha, cost_ratio, max_length, verify_cost=lambda length: 1.0) -> int:
    """The optimum by trying every length in rational arithmetic; index finds the smallest of ties."""
    speedups = [
        exact_tokens(alpha, g) / (g * Fraction(cost_ratio) + Fraction(verify_cost(g))) for g in range(max_length + 1)
    ]
    return speedups.index(max(speedups))


# ---------------------------------------------------------------- expected_tokens


# (1 - a^(g+1)) / (1 - a) of arXiv:2211.17192, eq. 1, worked out by hand. A table that is in circulation has
# 2.95 and 3.54 for alpha 0.7; those two are wrong: 1 + 0.7 + 0.49 + 0.343 + 0.2401 = 2.7731.
@pytest.mark.parametrize(
    ("alpha", "gamma", "expected"),
    [(0.5, 4, 1.94), (0.5, 8, 2.00), (0.7, 4, 2.77), (0.7, 8, 3.20), (0.9, 4, 4.10), (0.9, 8, 6.13)],
)
def test_expected_tokens_table(alpha, gamma, expected):
    assert round(analysis.expected_tokens(alpha, gamma), 2) == expected


@pytest.mark.parametrize("gamma", GAMMAS)
def test_expected_tokens_at_the_edges_is_exact(gamma):
    assert analysis.expected_tokens(0, gamma) == 1.0
    assert analysis.expected_tokens(1, gamma) == gamma + 1
    assert isinstance(analysis.expected_tokens(1, gamma), float)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_expected_tokens_without_a_draft_is_plain_decoding(alpha):
    assert analysis.expected_tokens(alpha, 0) == 1.0


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_expected_tokens_is_the_sum_of_powers(alpha, gamma):
    assert analysis.expected_tokens(alpha, gamma) == pytest.approx(
        math.fsum(alpha**i for i in range(gamma + 1)), rel=1e-14, abs=0
    )


@pytest.mark.parametrize("alpha", [1 - 1e-8, 1 - 1e-9, 1 - 1e-12])
def test_expected_tokens_does_not_cancel_near_one(alpha):
    exact = float(exact_tokens(alpha, 4))
    assert analysis.expected_tokens(alpha, 4) == pytest.approx(exact, rel=1e-15, abs=0)
    # The closed form evaluated as written would fail here: its numerator cancels.
    assert abs((1 - alpha**5) / (1 - alpha) / exact - 1) > 1e-12


# ---------------------------------------------------------------- speedup


def test_speedup_by_hand():
    # E(0.5, 2) = 1.75; a round costs 2 * 0.125 + 1 = 1.25, or 2 * 0.125 + 1.5 = 1.75 with dear verification.
    assert analysis.speedup(0.5, 2, 0.125) == pytest.approx(1.4, rel=1e-15)
    assert analysis.speedup(0.5, 2, 0.125, verify_cost=1.5) == pytest.approx(1.0, rel=1e-15)


def test_speedup_with_a_free_draft_is_expected_tokens():
    for alpha in ALPHAS:
        for gamma in GAMMAS:
            assert analysis.speedup(alpha, gamma, 0) == analysis.expected_tokens(alpha, gamma)


def test_speedup_without_a_draft_is_one_over_the_forward():
    assert analysis.speedup(0.7, 0, 0.3) == 1.0
    assert analysis.speedup(0.7, 0, 0.3, verify_cost=2) == 0.5


def test_speedup_with_a_useless_draft_is_a_loss():
    assert analysis.speedup(0, 4, 0.25) == 0.5


def test_speedup_at_alpha_one():
    assert analysis.speedup(1, 4, 0.25) == 2.5


def test_short_form_by_hand():
    # E(0.5, 2) = 1.75 over 1 + 0.25.
    assert analysis.speedup_short_form(0.5, 2, 0.25) == pytest.approx(1.4, rel=1e-15)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("cost_ratio", [c for c in COSTS if c > 0])
def test_short_form_over_promises_from_two_tokens_on(alpha, cost_ratio):
    for gamma in [g for g in GAMMAS if g >= 2]:
        assert analysis.speedup_short_form(alpha, gamma, cost_ratio) > analysis.speedup(alpha, gamma, cost_ratio)
    assert analysis.speedup_short_form(alpha, 1, cost_ratio) == analysis.speedup(alpha, 1, cost_ratio)
    assert analysis.speedup_short_form(alpha, 0, cost_ratio) < analysis.speedup(alpha, 0, cost_ratio)


# ---------------------------------------------------------------- optimal_draft_length


def stepped_cost(length: int) -> float:
    """A forward that pays for its tokens in blocks of four, so that the speed-up has several peaks."""
    return 1.0 + 0.25 * (length // 4)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("cost_ratio", COSTS)
def test_optimal_length_is_the_brute_force_optimum(alpha, cost_ratio):
    # alpha = 1e-12 with a free draft is left out: its later terms are below the smallest float.
    if (alpha, cost_ratio) != (1e-12, 0.0):
        assert analysis.optimal_draft_length(alpha, cost_ratio, 32) == exact_best_length(alpha, cost_ratio, 32)
    assert analysis.optimal_draft_length(alpha, cost_ratio, 32, stepped_cost) == exact_best_length(
        alpha, cost_ratio, 32, stepped_cost
    )


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("cost_ratio", COSTS)
def test_no_length_has_a_larger_speedup_than_the_optimal_one(alpha, cost_ratio):
    best = analysis.optimal_draft_length(alpha, cost_ratio)
    assert 0 <= best <= 64
    largest = max(analysis.speedup(alpha, gamma, cost_ratio) for gamma in range(65))
    assert analysis.speedup(alpha, best, cost_ratio) == pytest.approx(largest, rel=1e-14, abs=0)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("cost_ratio", [0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 1.0])
def test_optimal_length_beats_or_ties_the_rule_of_thumb(alpha, cost_ratio):
    best = analysis.optimal_draft_length(alpha, cost_ratio)
    rule = analysis.rule_of_thumb_draft_length(alpha, cost_ratio)
    best_speedup = analysis.speedup(alpha, best, cost_ratio)
    for rounded in (math.floor(rule), math.ceil(rule)):
        assert best_speedup >= analysis.speedup(alpha, rounded, cost_ratio) * (1 - 1e-14)
    assert best <= rule  # the rule overshoots, as its docstring says


def test_rule_of_thumb_is_not_the_answer():
    # 0.8^g = 0.05 at g = 13.4, while drafting 13 tokens is slower than drafting 8:
    # E(0.8, 13) / 1.65 = 4.780 / 1.65 = 2.90 against E(0.8, 8) / 1.4 = 4.329 / 1.4 = 3.09.
    assert analysis.rule_of_thumb_draft_length(0.8, 0.05) == pytest.approx(13.425, abs=5e-4)
    assert round(analysis.speedup(0.8, 13, 0.05), 2) == 2.90
    assert round(analysis.speedup(0.8, 8, 0.05), 2) == 3.09
    assert analysis.optimal_draft_length(0.8, 0.05) == 8


def test_optimal_length_takes_the_smallest_of_ties():
    assert analysis.optimal_draft_length(0.0, 0.0) == 0  # every length yields 1
    assert analysis.optimal_draft_length(1.0, 1.0) == 0  # every length yields (g + 1) / (g + 1)
    for rate in (0.1, 0.3, 0.7, 0.9):
        assert analysis.optimal_draft_length(rate, rate) == 0  # (1 + a) / (1 + c) = 1: one token pays nothing


def test_optimal_length_when_more_is_always_better():
    assert analysis.optimal_draft_length(1.0, 0.5, max_length=7) == 7
    # E rounds to 2.0 at 53 tokens, and yet each further one adds a little at no cost.
    assert analysis.optimal_draft_length(0.5, 0.0) == 64


def test_optimal_length_is_zero_for_a_draft_dearer_than_its_acceptance():
    assert analysis.optimal_draft_length(0.5, 0.6) == 0
    assert analysis.optimal_draft_length(0.9, 0.05, max_length=0) == 0


def test_verify_cost_is_called_with_each_draft_length():
    seen = []

    def verify_cost(length: int) -> float:
        seen.append(length)
        return 1.0 + 10.0 * (length > 3)

    assert analysis.optimal_draft_length(0.99, 0.0, max_length=6, verify_cost=verify_cost) == 3
    assert sorted(set(seen)) == [0, 1, 2, 3, 4, 5, 6]


def test_optimal_length_crosses_a_valley():
    # Lengths 1 to 3 lose (verify_cost 4), 4 wins: E(1, 4) = 5 tokens for 1.5.
    costs = {0: 1.0, 1: 4.0, 2: 4.0, 3: 4.0, 4: 1.5}
    assert analysis.optimal_draft_length(1.0, 0.0, 4, costs.__getitem__) == 4


def test_rule_of_thumb_by_hand():
    assert analysis.rule_of_thumb_draft_length(0.5, 0.125) == pytest.approx(3.0, rel=1e-15)
    assert math.copysign(1, analysis.rule_of_thumb_draft_length(0.5, 1.0)) == 1.0
    assert analysis.rule_of_thumb_draft_length(0.5, 1.0) == 0.0


# ---------------------------------------------------------------- acceptance_rate


def test_acceptance_rate_counts_trials():
    # 2 rounds of one failure, 3 of a success and a failure, 5 of two successes: 3 + 10 of 2 + 6 + 10.
    estimate = analysis.acceptance_rate([2, 3, 5])
    assert (estimate.accepted, estimate.tried) == (13, 18)
    assert estimate.rate == 13 / 18


def test_acceptance_rate_with_an_explicit_draft_length():
    # Drafted 4, so the last bin is no full acceptance and its rounds failed once as well.
    estimate = analysis.acceptance_rate([2, 3, 5], draft_length=4)
    assert (estimate.accepted, estimate.tried) == (13, 23)
    padded = analysis.acceptance_rate([2, 3, 5, 0, 0])
    assert padded == estimate
    assert analysis.acceptance_rate([2, 3, 5, 0, 0], draft_length=2) == analysis.acceptance_rate([2, 3, 5])


# The ends of Wilson's interval are the two roots r of (rate - r)^2 = z^2 r (1 - r) / n; z from a printed
# table of the normal distribution.
@pytest.mark.parametrize(
    ("confidence", "z"), [(0.90, 1.6448536), (0.95, 1.9599640), (0.99, 2.5758293), (0.999, 3.2905267)]
)
@pytest.mark.parametrize("histogram", [[2, 3, 5], [40, 10, 5, 2, 1], [1, 0, 99]])
def test_interval_ends_solve_the_score_equation(histogram, confidence, z):
    estimate = analysis.acceptance_rate(histogram, confidence=confidence)
    assert 0 < estimate.low < estimate.rate < estimate.high < 1
    for end in (estimate.low, estimate.high):
        assert (estimate.rate - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / estimate.tried, rel=1e-6)


def test_interval_of_a_worked_example():
    # 8 of 10 at 95 %: z^2 = 3.841459; centre (0.8 + 0.192073) / 1.384146 = 0.716740; half-width
    # 1.959964 / 1.384146 * sqrt(0.016 + 0.00960365) = 0.226577.
    estimate = analysis.acceptance_rate([2, 8])
    assert (estimate.accepted, estimate.tried) == (8, 10)
    assert estimate.low == pytest.approx(0.490163, abs=2e-6)
    assert estimate.high == pytest.approx(0.943317, abs=2e-6)


def test_interval_at_the_ends_of_the_range():
    # At 0 of n the upper end is z^2 / (n + z^2), at n of n the lower one is n / (n + z^2).
    none, every = analysis.acceptance_rate([10, 0]), analysis.acceptance_rate([0, 10])
    assert (none.rate, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(3.841459 / 13.841459, abs=1e-6)
    assert (every.rate, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(10 / 13.841459, abs=1e-6)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_interval_stays_in_the_range_to_the_last_bit(confidence):
    for tried in range(1, 200):
        none = analysis.acceptance_rate([tried, 0], confidence=confidence)
        every = analysis.acceptance_rate([0, tried], confidence=confidence)
        assert (none.low, every.high) == (0.0, 1.0)


def test_interval_widens_with_confidence_and_narrows_with_trials():
    usual = analysis.acceptance_rate([2, 3, 5])
    surer = analysis.acceptance_rate([2, 3, 5], confidence=math.nextafter(1, 0))
    longer = analysis.acceptance_rate([200, 300, 500])
    assert surer.low < usual.low < longer.low < longer.high < usual.high < surer.high


def test_estimate_is_frozen():
    with pytest.raises(FrozenInstanceError):
        analysis.acceptance_rate([1, 1]).rate = 0.5


def test_rate_and_mean_length_agree_with_the_model():
    # 1000 rounds that follow alpha = 0.5, gamma = 3 exactly: 500, 250, 125, and 125 with all accepted.
    histogram = [500, 250, 125, 125]
    assert analysis.acceptance_rate(histogram).rate == 0.5
    assert analysis.mean_acceptance_length(histogram) == analysis.expected_tokens(0.5, 3) == 1.875


def test_mean_acceptance_length():
    assert analysis.mean_acceptance_length([7]) == 1.0  # plain decoding
    assert analysis.mean_acceptance_length([2, 3, 5]) == 2.3  # (2 + 6 + 15) / 10


# ---------------------------------------------------------------- expected_tree_tokens


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_chain_is_a_tree(alpha, gamma):
    parents = list(range(-1, gamma))
    tree = analysis.expected_tree_tokens(parents, [NAN] + [alpha] * gamma)
    assert tree == pytest.approx(analysis.expected_tokens(alpha, gamma), rel=1e-14, abs=0)


def test_a_small_tree_by_hand():
    #   0 -+- 1 (0.5) -+- 3 (0.5)      paths: 1: 0.5, 2: 0.25, 3: 0.25, 4: 0.125, 5: 0.25 * 0.75 = 0.1875
    #      |           +- 4 (0.25)     E = 1 + 0.5 + 0.25 + 0.25 + 0.125 + 0.1875
    #      +- 2 (0.25) --- 5 (0.75)
    parents = [-1, 0, 0, 1, 1, 2]
    assert analysis.expected_tree_tokens(parents, [0, 0.5, 0.25, 0.5, 0.25, 0.75]) == 2.3125


def test_a_lone_root_is_plain_decoding():
    assert analysis.expected_tree_tokens([-1], [0.3]) == 1.0


def test_siblings_may_sum_to_one_up_to_rounding():
    assert analysis.expected_tree_tokens([-1] + [0] * 10, [0] + [0.1] * 10) == pytest.approx(2.0)
    assert analysis.expected_tree_tokens([-1, 0, 0], [0, 0.5, 0.5 + 5e-10]) == pytest.approx(2.0)
    with pytest.raises(AnalysisError, match=r"children of node 0 must sum to at most 1, got 1\.00000001"):
        analysis.expected_tree_tokens([-1, 0, 0], [0, 0.5, 0.5 + 1e-8])


# ---------------------------------------------------------------- acceptance from distributions


@pytest.mark.parametrize(("total_variation", "coupled", "rejection"), [(0, 1.0, 1.0), (0.25, 0.6, 0.75), (1, 0.0, 0.0)])
def test_acceptance_from_total_variation(total_variation, coupled, rejection):
    assert analysis.coupled_acceptance_bound(total_variation) == coupled
    assert analysis.rejection_acceptance(total_variation) == rejection


def test_all_is_sorted_and_exists():
    assert list(analysis.__all__) == sorted(analysis.__all__)
    public = {
        name
        for name, value in vars(analysis).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == analysis.__name__
    }
    assert public == set(analysis.__all__)
