"""The speed-up formulas asked outside their domain."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from hf_specdec import analysis
from hf_specdec.errors import AnalysisError

NAN, INF = math.nan, math.inf
BAD_PROBABILITIES = [-1e-9, 1 + 1e-9, NAN, INF, -INF, True, "0.5", None, 1j]
BAD_INTEGERS = [-1, True, False, 2.0, NAN, "2", None]
BAD_COSTS = [-1e-9, NAN, INF, True, "1", None, 10**400]


def refuses(name, value, allowed):
    """A context that expects the error to name the argument, the allowed range and the value."""
    return pytest.raises(AnalysisError, match=_message(name, value, allowed))


def _message(name, value, allowed):
    return "^" + re.escape(f"{name} must be {allowed}") + ".*" + re.escape(f"got {value!r}") + "$"


@pytest.mark.parametrize("value", BAD_PROBABILITIES)
def test_bad_probabilities(value):
    allowed = "a number in [0, 1]"
    for call in (
        lambda: analysis.expected_tokens(value, 4),
        lambda: analysis.speedup(value, 4, 0.1),
        lambda: analysis.speedup_short_form(value, 4, 0.1),
        lambda: analysis.optimal_draft_length(value, 0.1),
    ):
        with refuses("alpha", value, allowed):
            call()
    for call in (analysis.coupled_acceptance_bound, analysis.rejection_acceptance):
        with refuses("total_variation", value, allowed):
            call(value)
    with refuses("acceptance[1]", value, allowed):
        analysis.expected_tree_tokens([-1, 0], [1.0, value])


@pytest.mark.parametrize("value", BAD_INTEGERS)
def test_bad_integers(value):
    allowed = "an integer >= 0"
    for call in (
        lambda: analysis.expected_tokens(0.5, value),
        lambda: analysis.speedup(0.5, value, 0.1),
        lambda: analysis.speedup_short_form(0.5, value, 0.1),
    ):
        with refuses("gamma", value, allowed):
            call()
    with refuses("max_length", value, allowed):
        analysis.optimal_draft_length(0.5, 0.1, value)
    with refuses("histogram[1]", value, allowed):
        analysis.acceptance_rate([3, value])
    with refuses("histogram[1]", value, allowed):
        analysis.mean_acceptance_length([3, value])
    if value is not None:  # None is the default there
        with refuses("draft_length", value, allowed):
            analysis.acceptance_rate([3, 4], value)


@pytest.mark.parametrize("value", BAD_COSTS)
def test_bad_costs(value):
    for call in (
        lambda: analysis.speedup(0.5, 4, value),
        lambda: analysis.speedup_short_form(0.5, 4, value),
        lambda: analysis.optimal_draft_length(0.5, value),
    ):
        with refuses("cost_ratio", value, "a finite number >= 0"):
            call()


@pytest.mark.parametrize("value", [*BAD_COSTS, 0, 0.0])
def test_bad_verify_costs(value):
    with refuses("verify_cost", value, "a finite number > 0"):
        analysis.speedup(0.5, 4, 0.1, verify_cost=value)
    with refuses("verify_cost(2)", value, "a finite number > 0"):
        analysis.optimal_draft_length(0.5, 0.1, 4, lambda length: value if length == 2 else 1.0)


def test_verify_cost_of_the_optimum_is_a_function():
    with refuses("verify_cost", 1.0, "a function from draft length to relative cost, or None"):
        analysis.optimal_draft_length(0.5, 0.1, verify_cost=1.0)


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.1, NAN, True])
def test_rule_of_thumb_needs_an_alpha_inside(alpha):
    with refuses("alpha", alpha, "a number in (0, 1)"):
        analysis.rule_of_thumb_draft_length(alpha, 0.1)


@pytest.mark.parametrize("cost_ratio", [0, -0.1, 1.1, NAN, INF, True])
def test_rule_of_thumb_needs_a_cost_inside(cost_ratio):
    with refuses("cost_ratio", cost_ratio, "a number in (0, 1]"):
        analysis.rule_of_thumb_draft_length(0.5, cost_ratio)


@pytest.mark.parametrize("confidence", [0, 1, -0.5, 95, NAN, True, None])
def test_confidence_is_inside(confidence):
    with refuses("confidence", confidence, "a number in (0, 1)"):
        analysis.acceptance_rate([2, 3, 5], confidence=confidence)


@pytest.mark.parametrize("function", [analysis.acceptance_rate, analysis.mean_acceptance_length])
def test_histograms_that_say_nothing(function):
    with pytest.raises(AnalysisError, match=r"^histogram must have at least one entry .*got none$"):
        function([])
    with pytest.raises(AnalysisError, match=r"^histogram must count at least one round.*got \[0, 0\]"):
        function([0, 0])
    # A Counter would be read as its keys, a number as nothing at all.
    with pytest.raises(AnalysisError, match=r"^histogram must be a sequence, got Counter"):
        function(Counter({0: 3, 1: 5}))
    with pytest.raises(AnalysisError, match=r"^histogram must be a sequence, got int 3$"):
        function(3)


def test_histogram_without_drafts_has_no_trials():
    with pytest.raises(AnalysisError, match=r"with a drafted token, got \[5\] with draft_length 0$"):
        analysis.acceptance_rate([5])


def test_histogram_beyond_the_draft_length():
    with pytest.raises(AnalysisError, match=r"^histogram\[2\] must be 0 where draft_length is 1, got 5 rounds"):
        analysis.acceptance_rate([2, 3, 5], draft_length=1)


@pytest.mark.parametrize(
    ("parents", "acceptance", "message"),
    [
        ([], [], r"^parents must hold at least the root, \[-1\]; got no nodes$"),
        ([-1, 0], [1.0], r"^parents and acceptance must have one entry a node each, got 2 and 1$"),
        ([0], [1.0], r"^parents\[0\] must be -1 \(node 0 is the root\), got 0$"),
        ([-2], [1.0], r"^parents\[0\] must be an integer >= -1, got -2$"),
        ([None], [1.0], r"^parents\[0\] must be an integer >= -1, got None$"),
        ([-1, -1], [1.0, 0.5], r"^parents\[1\] must be an integer >= 0, got -1$"),
        ([-1, False], [1.0, 0.5], r"^parents\[1\] must be an integer >= 0, got False$"),
        ([-1, 0.0], [1.0, 0.5], r"^parents\[1\] must be an integer >= 0, got 0\.0$"),
        ([-1, 1], [1.0, 0.5], r"^parents\[1\] must be an integer in \[0, 0\] .*got 1$"),
        ([-1, 0, 3, 2], [1.0, 0.5, 0.5, 0.5], r"^parents\[2\] must be an integer in \[0, 1\] .*got 3$"),
        ({0: -1}, [1.0], r"^parents must be a sequence, got dict"),
        ([-1], 1.0, r"^acceptance must be a sequence, got float 1\.0$"),
    ],
)
def test_malformed_trees(parents, acceptance, message):
    with pytest.raises(AnalysisError, match=message):
        analysis.expected_tree_tokens(parents, acceptance)


def test_siblings_that_sum_over_one():
    # Node 1's children, 3 and 4, not neighbours of 2's child.
    with pytest.raises(AnalysisError, match=r"children of node 1 must sum to at most 1, got 1\.25 up to node 5"):
        analysis.expected_tree_tokens([-1, 0, 0, 1, 2, 1], [1.0, 0.5, 0.5, 0.5, 0.5, 0.75])


def test_the_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"^alpha must be a number in \[0, 1\], got 2$"):
        analysis.expected_tokens(2, 4)
