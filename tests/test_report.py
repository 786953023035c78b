"""How measurements add up to a report, and how a report is shown."""

from __future__ import annotations

import json

import pytest

from hf_specdec.measure import bench
from hf_specdec.measure.demo import PROMPTS, draw_chart
from hf_specdec.measure.report import (
    OVERALL,
    PLAIN,
    Case,
    Environment,
    Measurement,
    Report,
    Settings,
    count_differing,
    count_tokens,
    summarize,
)

ENVIRONMENT = Environment("tiny", None, "float32", "cpu", 1, "2", "5", "0")


def timed(case, seconds, *, task="a", batch=0, repeat=0, tokens=10, rows=1, differing=0, accepted=None, rounds=None):
    return Measurement(case, task, batch, repeat, seconds, rows, tokens, differing, accepted, rounds)


def summary_of(summaries, case, task="a"):
    return next(summary for summary in summaries if summary.case == case and summary.task == task)


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ("rows", "eos", "expected"),
    [
        ([[5, 6, 7]], [2], 3),
        ([[5, 2, 0, 0]], [2], 2),  # the EOS counts, the padding does not
        ([[5, 2, 2, 2]], [2], 2),  # even where padding is the EOS
        ([[2]], [2], 1),
        ([[5, 3, 0], [5, 6, 2], [4, 4, 4]], [2, 3], 8),
        ([[5, 2, 7]], [], 3),
        ([[]], [2], 0),
    ],
)
def test_count_tokens(rows, eos, expected):
    assert count_tokens(rows, eos) == expected


def test_count_differing():
    plain = [[1, 2, 0], [3, 4, 5]]
    assert count_differing([[1, 2, 0], [3, 4, 5]], plain) == 0
    assert count_differing([[1, 2, 0], [3, 4, 6]], plain) == 1
    # one step fewer for all rows: each of them is another output
    assert count_differing([[1, 2], [3, 4]], plain) == 2


# ---------------------------------------------------------------- aggregation


def test_ratio_is_of_the_sums_of_medians_over_repeats():
    # plain: medians 4 and 1; mode: medians 1 and 2. Sums 5 / 3; per batch 4 and 0.5, median 2.25.
    measurements = [
        *(timed(PLAIN, seconds, batch=0, repeat=r) for r, seconds in enumerate([3.0, 4.0, 90.0])),
        *(timed(PLAIN, seconds, batch=1, repeat=r) for r, seconds in enumerate([1.0, 1.0, 1.0])),
        *(timed("mode", seconds, batch=0, repeat=r) for r, seconds in enumerate([70.0, 1.0, 0.5])),
        *(timed("mode", seconds, batch=1, repeat=r, tokens=5) for r, seconds in enumerate([2.0, 2.0, 9.0])),
    ]
    summaries = summarize(measurements)
    assert [(summary.task, summary.case) for summary in summaries] == [("a", PLAIN), ("a", "mode")]
    plain, mode = summaries
    assert (plain.seconds, mode.seconds) == (5.0, 3.0)
    assert plain.ratio == plain.median_ratio == 1.0
    assert mode.ratio == pytest.approx(5 / 3)
    assert mode.median_ratio == 2.25
    assert plain.tokens_per_second == 20 / 5
    assert mode.tokens_per_second == 15 / 3


def test_overall_is_added_where_there_are_several_tasks():
    measurements = [
        timed(PLAIN, 2.0, task="a", batch=0),
        timed("mode", 1.0, task="a", batch=0),
        timed(PLAIN, 6.0, task="b", batch=1),
        timed("mode", 3.0, task="b", batch=1, differing=1),
    ]
    summaries = summarize(measurements)
    assert [summary.task for summary in summaries] == ["a", "a", "b", "b", OVERALL, OVERALL]
    overall = summary_of(summaries, "mode", OVERALL)
    assert (overall.ratio, overall.tokens, overall.rows, overall.identical) == (2.0, 20, 2, False)
    assert summary_of(summaries, "mode", "a").identical


def test_mean_acceptance_length_weighs_every_round_alike():
    measurements = [
        timed(PLAIN, 1.0),
        timed("mode", 1.0, batch=0, accepted=9, rounds=1),
        timed(PLAIN, 1.0, batch=1),
        timed("mode", 1.0, batch=1, accepted=0, rounds=9),
        timed("other", 1.0, batch=0),
        timed("short", 1.0, batch=0, accepted=0, rounds=0),
    ]
    summaries = summarize(measurements)
    # (9 accepted + 10 rounds) / 10 rounds, not the mean of 10 and 1
    assert summary_of(summaries, "mode").mean_acceptance_length == pytest.approx(1.9)
    assert summary_of(summaries, PLAIN).mean_acceptance_length == 1.0
    assert summary_of(summaries, "other").mean_acceptance_length is None
    assert summary_of(summaries, "short").mean_acceptance_length == 1.0


def test_a_row_that_differs_in_several_repeats_counts_once():
    measurements = [
        *(timed(PLAIN, 1.0, repeat=r, rows=4) for r in range(3)),
        *(timed("mode", 1.0, repeat=r, rows=4, differing=d) for r, d in enumerate([1, 2, 0])),
    ]
    mode = summary_of(summarize(measurements), "mode")
    assert (mode.differing_rows, mode.rows, mode.identical) == (2, 4, False)


def test_broken_promises_are_those_of_cases_that_made_one():
    cases = (Case(PLAIN, {}), Case("kept", {}), Case("broken", {}), Case("free", {}, promises_plain=False))
    measurements = tuple(timed(case.name, 1.0, differing=case.name in ("broken", "free")) for case in cases)
    report = Report(ENVIRONMENT, Settings(), cases, measurements)
    assert report.broken_promises == ["broken"]


# ---------------------------------------------------------------- reports


@pytest.fixture
def report():
    cases = tuple(Case(name, {}) for name in (PLAIN, "prompt_lookup", "transformers lookup"))
    measurements = tuple(
        timed(case.name, seconds, task=prompt.task, batch=batch)
        for batch, prompt in enumerate(PROMPTS)
        for case, seconds in zip(cases, (2.0, 1.0, 4.0), strict=True)
    )
    return Report(ENVIRONMENT, Settings(), cases, measurements, (bench.Skipped("assistant", "why"),))


def test_to_json(report):
    content = json.loads(report.to_json())
    assert content["environment"]["model"] == "tiny"
    assert content["settings"]["max_new_tokens"] == 128
    assert content["skipped"] == [{"case": "assistant", "reason": "why"}]
    assert len(content["measurements"]) == 9
    first = content["summaries"][1]
    assert (first["task"], first["case"], first["ratio"], first["identical"]) == ("copying", "prompt_lookup", 2.0, True)
    assert content["summaries"][-1]["task"] == "overall"


def test_chart(report, tmp_path):
    draw_chart(report, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_has_three_prompts():
    assert [prompt.task for prompt in PROMPTS] == ["copying", "quoting", "open"]
    code = PROMPTS[0].text.split("```python\n")[1].split("```")[0]
    compile(code, "demo", "exec")
    assert 20 <= len(code.splitlines()) <= 30
