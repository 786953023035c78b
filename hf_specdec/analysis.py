"""What speculative decoding can gain: its formulas over plain numbers.

p is the target and q the draft. The three quantities every formula here is written in:

- `alpha`: acceptance rate, the probability that a drafted token is accepted given that the tokens drafted
  before it were; one number for all positions, as in Leviathan et al. (arXiv:2211.17192).
- `gamma`: draft length, the tokens drafted in a round.
- `cost_ratio` (c): seconds of one draft forward / seconds of one target forward over one token.

A round is the drafting and the one target forward that verifies it. Every count of tokens includes the bonus
token, so plain decoding is 1.0; every speed-up is relative to plain decoding, which is 1.0 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from .errors import AnalysisError
from .number_checks import (
    as_cost_ratio,
    as_counts,
    as_integer,
    as_items,
    as_number,
    as_probability,
    as_verify_cost,
)

__all__ = [
    "AcceptanceEstimate",
    "acceptance_rate",
    "coupled_acceptance_bound",
    "expected_tokens",
    "expected_tree_tokens",
    "mean_acceptance_length",
    "optimal_draft_length",
    "rejection_acceptance",
    "rule_of_thumb_draft_length",
    "speedup",
    "speedup_short_form",
]

# Siblings exclude each other, so their probabilities sum to at most 1, up to the rounding of a softmax.
_SIBLING_SLACK = 1e-9


# ---------------------------------------------------------------- chains


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens a target forward yields when a chain of `gamma` tokens is drafted.

    E = (1 - alpha^(gamma+1)) / (1 - alpha) = sum of alpha^i for i = 0..gamma (arXiv:2211.17192, eq. 1);
    gamma + 1 at alpha = 1. Accurate to rounding for alpha near 1 as well.

    Args:
        alpha: Acceptance rate, in [0, 1].
        gamma: Draft length in tokens, an integer >= 0.

    Returns:
        Tokens a round, bonus included, in [1, gamma + 1].

    Raises:
        AnalysisError: An argument is outside its range.
    """
    alpha = as_probability("alpha", alpha)
    gamma = as_integer("gamma", gamma)
    if alpha == 0 or gamma == 0:
        return 1.0
    if alpha == 1:
        return float(gamma + 1)
    # 1 - alpha^n = -expm1(n log alpha): where alpha^n is close to 1 the plain difference cancels.
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)


def speedup(alpha: float, gamma: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """How many times faster than plain decoding a chain of `gamma` drafted tokens is expected to be.

    S = E / (gamma * c + verify_cost), E = `expected_tokens` (arXiv:2211.17192, theorem 3.8, where verify_cost
    is 1: a forward over gamma + 1 tokens takes no longer than one over a single token).

    Args:
        alpha: Acceptance rate, in [0, 1].
        gamma: Draft length in tokens, an integer >= 0.
        cost_ratio: c, one draft forward / one target forward, finite and >= 0.
        verify_cost: A target forward over gamma + 1 tokens / one over a single token, finite and > 0.

    Returns:
        Seconds of plain decoding / seconds of speculative decoding for the same tokens; below 1 is a loss.

    Raises:
        AnalysisError: An argument is outside its range.
    """
    cost_ratio = as_cost_ratio(cost_ratio)
    verify_cost = as_verify_cost("verify_cost", verify_cost)
    return expected_tokens(alpha, gamma) / (gamma * cost_ratio + verify_cost)


def speedup_short_form(alpha: float, gamma: int, cost_ratio: float) -> float:
    """The shortened speed-up E / (1 + c), which over-promises: read `speedup` instead.

    It charges one draft forward per round however many tokens are drafted. It agrees with `speedup` at
    gamma = 1, promises too much from gamma = 2 on (as soon as c > 0), and too little at gamma = 0. It is
    here to check figures that were quoted by it.

    Args:
        alpha: Acceptance rate, in [0, 1].
        gamma: Draft length in tokens, an integer >= 0.
        cost_ratio: c, one draft forward / one target forward, finite and >= 0.

    Returns:
        The short form's ratio of plain to speculative seconds.

    Raises:
        AnalysisError: An argument is outside its range.
    """
    cost_ratio = as_cost_ratio(cost_ratio)
    return expected_tokens(alpha, gamma) / (1 + cost_ratio)


def optimal_draft_length(
    alpha: float,
    cost_ratio: float,
    max_length: int = 64,
    verify_cost: Callable[[int], float] | None = None,
) -> int:
    """The draft length in 0..max_length with the largest `speedup`; 0 means do not draft.

    Every length is tried, since a measured verify_cost has steps and the speed-up then has several peaks.
    With T = gamma * c + verify_cost, a round's cost, length g beats the best so far, b, where
    (E_g - E_b) * T_b > E_b * (T_g - T_b): a ratio rule as in Sequoia (arXiv:2402.12374), on the chain of
    arXiv:2211.17192.

    Args:
        alpha: Acceptance rate, in [0, 1].
        cost_ratio: c, one draft forward / one target forward, finite and >= 0.
        max_length: The longest draft to consider, an integer >= 0.
        verify_cost: Called with each draft length g: a target forward over g + 1 tokens / one over a single
            token, finite and > 0. None is 1.0 throughout, as in the paper.

    Returns:
        The best draft length in tokens, the smallest one on ties.

    Raises:
        AnalysisError: An argument, or a value `verify_cost` returned, is outside its range.
    """
    alpha = as_probability("alpha", alpha)
    cost_ratio = as_cost_ratio(cost_ratio)
    max_length = as_integer("max_length", max_length)
    if verify_cost is not None and not callable(verify_cost):
        raise AnalysisError(
            f"verify_cost must be a function from draft length to relative cost, or None; got {verify_cost!r}"
        )

    def verify(length: int) -> float:
        return 1.0 if verify_cost is None else as_verify_cost(f"verify_cost({length})", verify_cost(length))

    best, best_verify = 0, verify(0)
    for length in range(1, max_length + 1):
        length_verify = verify(length)
        # Differences are formed from their own terms, never by subtracting two totals: ties such as
        # alpha = c stay exact, and a free draft (c = 0) still grows where E has rounded to its limit.
        more_tokens = alpha ** (best + 1) * expected_tokens(alpha, length - best - 1)
        more_cost = (length - best) * cost_ratio + (length_verify - best_verify)
        best_cost = best * cost_ratio + best_verify
        if more_tokens * best_cost > expected_tokens(alpha, best) * more_cost:
            best, best_verify = length, length_verify
    return best


def rule_of_thumb_draft_length(alpha: float, cost_ratio: float) -> float:
    """log(c) / log(alpha), a rule of thumb for the draft length; `optimal_draft_length` is the answer.

    It is the length at which the last drafted token's chance, alpha^gamma, has fallen to its own cost c. The
    optimum of arXiv:2211.17192 compares that chance with c * speedup instead, so the rule never falls short
    of it, and overshoots the more the more there is to gain.

    Args:
        alpha: Acceptance rate, in (0, 1).
        cost_ratio: c, one draft forward / one target forward, in (0, 1]; above 1 the rule turns negative.

    Returns:
        A draft length in tokens, not rounded.

    Raises:
        AnalysisError: An argument is outside its range, where the rule is undefined.
    """
    alpha = as_number("alpha", alpha, "a number in (0, 1) for the rule of thumb", lambda x: 0 < x < 1)
    cost_ratio = as_number("cost_ratio", cost_ratio, "a number in (0, 1] for the rule of thumb", lambda x: 0 < x <= 1)
    return abs(math.log(cost_ratio) / math.log(alpha))  # abs: 0.0, not -0.0, at c = 1


# ---------------------------------------------------------------- trees


def expected_tree_tokens(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Expected tokens a target forward yields when a token tree is drafted.

    E = 1 + sum over nodes i >= 1 of the product of `acceptance` along the path from the root to i (Sequoia,
    arXiv:2402.12374; Medusa, arXiv:2401.10774, estimates the factors from head accuracies). A chain with
    one rate alpha gives `expected_tokens`.

    Args:
        parents: Each node's parent. Node 0 is the root, the last committed token: parents[0] = -1, and
            0 <= parents[i] < i for the rest.
        acceptance: acceptance[i] = P(node i is the target's token | its parent is on the path), in [0, 1].
            Siblings exclude each other, so theirs sum to at most 1. acceptance[0] is ignored.

    Returns:
        Tokens a round, bonus included, in [1, depth of the tree + 1].

    Raises:
        AnalysisError: The parents are malformed, the lengths differ, a probability is outside [0, 1], or
            the probabilities of siblings sum to more than 1.
    """
    parents, acceptance = as_items("parents", parents), as_items("acceptance", acceptance)
    if len(parents) != len(acceptance):
        raise AnalysisError(
            f"parents and acceptance must have one entry a node each, got {len(parents)} and {len(acceptance)}"
        )
    if not parents:
        raise AnalysisError("parents must hold at least the root, [-1]; got no nodes")
    if as_integer("parents[0]", parents[0], low=-1) != -1:
        raise AnalysisError(f"parents[0] must be -1 (node 0 is the root), got {parents[0]!r}")

    path_probability = [1.0]
    children_probability = [0.0] * len(parents)
    for node in range(1, len(parents)):
        parent = as_integer(f"parents[{node}]", parents[node])
        if parent >= node:
            raise AnalysisError(
                f"parents[{node}] must be an integer in [0, {node - 1}] (parents come first), got {parent}"
            )
        probability = as_probability(f"acceptance[{node}]", acceptance[node])
        children_probability[parent] += probability
        if children_probability[parent] > 1 + _SIBLING_SLACK:
            raise AnalysisError(
                f"acceptance over the children of node {parent} must sum to at most 1, "
                f"got {children_probability[parent]!r} up to node {node}"
            )
        path_probability.append(path_probability[parent] * probability)
    return math.fsum(path_probability)


# ---------------------------------------------------------------- measurements


@dataclass(frozen=True)
class AcceptanceEstimate:
    """An acceptance rate read off a run, with its Wilson score interval."""

    # accepted / tried, the alpha of every formula here
    rate: float
    # lower end of the interval, in [0, rate]
    low: float
    # upper end of the interval, in [rate, 1]
    high: float
    # drafted tokens that were accepted
    accepted: int
    # drafted tokens whose predecessors were all accepted; the others say nothing about alpha
    tried: int


def acceptance_rate(
    histogram: Sequence[int], draft_length: int | None = None, confidence: float = 0.95
) -> AcceptanceEstimate:
    """Acceptance rate alpha (arXiv:2211.17192) estimated from how many drafted tokens each round accepted.

    A round with k < draft_length accepted made k + 1 trials, k successes and a failure; one with all
    accepted made k. The interval is Wilson's, with z the normal quantile of (1 + confidence) / 2:
    (rate + z^2/2n +- z sqrt(rate (1 - rate)/n + z^2/4n^2)) / (1 + z^2/n), n = trials. It takes trials to be
    independent; tokens of one text are not quite, so it is on the narrow side.

    Args:
        histogram: histogram[k] = rounds in which exactly k of `draft_length` drafted tokens were accepted.
        draft_length: Tokens drafted in every round. None takes the histogram to be complete,
            len(histogram) - 1: give it where trailing zeros may have been dropped.
        confidence: Coverage of the interval, in (0, 1).

    Returns:
        The rate, its interval and the counts behind it.

    Raises:
        AnalysisError: The histogram is empty, has a count that is no integer >= 0, counts rounds beyond
            `draft_length` or holds no trial at all, or an argument is outside its range.
    """
    counts = as_counts(histogram)
    length = len(counts) - 1 if draft_length is None else as_integer("draft_length", draft_length)
    confidence = as_number("confidence", confidence, "a number in (0, 1)", lambda x: 0 < x < 1)
    for k, rounds in enumerate(counts):
        if k > length and rounds:
            raise AnalysisError(
                f"histogram[{k}] must be 0 where draft_length is {length}, got {rounds} rounds with more "
                "tokens accepted than drafted"
            )
    accepted = sum(k * rounds for k, rounds in enumerate(counts))
    failures = sum(counts[:length])
    tried = accepted + failures
    if tried == 0:
        raise AnalysisError(
            "histogram must count at least one round with a drafted token, "
            f"got {list(counts)} with draft_length {length}"
        )

    rate = accepted / tried
    # The lower tail's quantile: (1 + confidence) / 2 would round to 1 for the largest confidences.
    z = -NormalDist().inv_cdf((1 - confidence) / 2)
    scale = 1 + z * z / tried
    centre = (rate + z * z / (2 * tried)) / scale
    half_width = z / scale * math.sqrt(rate * (1 - rate) / tried + (z / (2 * tried)) ** 2)
    return AcceptanceEstimate(
        rate=rate,
        # The interval holds the rate and stays in [0, 1] exactly, whatever the last bit of its ends.
        low=min(rate, max(0.0, centre - half_width)),
        high=max(rate, min(1.0, centre + half_width)),
        accepted=accepted,
        tried=tried,
    )


def mean_acceptance_length(histogram: Sequence[int]) -> float:
    """Mean tokens a target forward yielded, the bonus token included: what `expected_tokens` predicts.

    sum of (k + 1) * histogram[k] / sum of histogram[k]; plain decoding is 1.0. The "mean accepted tokens"
    of Spec-Bench (arXiv:2401.07851).

    Args:
        histogram: histogram[k] = rounds in which exactly k drafted tokens were accepted.

    Returns:
        Tokens a round, >= 1.

    Raises:
        AnalysisError: The histogram is empty, counts no round, or has a count that is no integer >= 0.
    """
    counts = as_counts(histogram)
    rounds = sum(counts)
    if rounds == 0:
        raise AnalysisError(f"histogram must count at least one round, got {list(counts)}")
    return sum((k + 1) * count for k, count in enumerate(counts)) / rounds


# ---------------------------------------------------------------- acceptance from distributions


def coupled_acceptance_bound(total_variation: float) -> float:
    """Least acceptance of a drafter that samples from the target's own noise: (1 - TV) / (1 + TV).

    The guarantee of drafter-invariant, Gumbel-style coupling (Daliri et al., arXiv:2408.07978); what such a
    drafter attains lies between it and `rejection_acceptance`.

    Args:
        total_variation: TV, half the sum of |p - q| over the vocabulary, in [0, 1].

    Returns:
        A lower bound of the acceptance probability at one position.

    Raises:
        AnalysisError: total_variation is outside [0, 1].
    """
    total_variation = as_probability("total_variation", total_variation)
    return (1 - total_variation) / (1 + total_variation)


def rejection_acceptance(total_variation: float) -> float:
    """Acceptance of speculative rejection sampling, sum of min(p, q) = 1 - TV (arXiv:2211.17192).

    No rule that keeps the target's distribution accepts one drafted token more often.

    Args:
        total_variation: TV, half the sum of |p - q| over the vocabulary, in [0, 1].

    Returns:
        The acceptance probability at one position.

    Raises:
        AnalysisError: total_variation is outside [0, 1].
    """
    return 1 - as_probability("total_variation", total_variation)
