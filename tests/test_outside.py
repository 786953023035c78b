"""A mode and an acceptance rule that come from one file outside the package each (for heads: test_outside_kind.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_same, model_of, prompt, run, texts_of
from outside import rule

import hf_specdec
from hf_specdec.errors import ConfigurationError, InvalidSettingError
from hf_specdec.testing import ScriptedDrafter

TESTS = Path(__file__).resolve().parent


def test_a_mode_passes_the_conformance_suite_by_registration_alone() -> None:
    """In a process of its own, whose tests see the mode among the registered ones."""
    suite = [str(TESTS / "test_conformance.py"), "-k", "followers", "-p", "outside.mode", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", *suite],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed, ran.stdout[-400:]
    assert int(passed.group(1)) > 300


@pytest.fixture
def _rules() -> Iterator[None]:
    hf_specdec.register_rule(rule.RULE)
    hf_specdec.register_rule(rule.LOSSY)
    yield
    hf_specdec.unregister_rule("even")
    hf_specdec.unregister_rule("even_lossy")


def knowing(do_sample: bool) -> tuple[Any, dict[str, Any], ScriptedDrafter]:
    model, inputs = model_of("llama"), prompt(3, padding=2)
    texts = texts_of(model, inputs, max_new_tokens=24, eos_token_id=None, do_sample=do_sample)
    return model, inputs, ScriptedDrafter.knowing(texts, 4)


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_lossless_rule_that_reads_the_tape(do_sample: bool) -> None:
    model, inputs, drafter = knowing(do_sample)
    asked = {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 4, "acceptance": "even"}}
    stats = assert_same(model, inputs, asked, max_new_tokens=24, eos_token_id=None, do_sample=do_sample)
    assert stats.lossless
    accepted = [
        token
        for verdict in drafter.verdicts
        for committed, count in zip(verdict.committed, verdict.accepted, strict=True)
        for token in committed[:count]
    ]
    assert accepted
    assert all(token % 2 == 0 for token in accepted)


@pytest.mark.usefixtures("_rules")
def test_a_rule_that_says_that_it_is_lossy_warns_and_has_no_tape() -> None:
    model, inputs, drafter = knowing(do_sample=True)
    asked = {"speculative_mode": drafter, "speculative_config": {"acceptance": "even_lossy"}}
    with pytest.warns(UserWarning, match="'even_lossy' is lossy"), hf_specdec.record() as stats:
        run(model, inputs, max_new_tokens=8, do_sample=True, **asked)
    assert not stats.lossless


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (hf_specdec.Mode("none", hf_specdec.SpeculativeConfig, lambda request, config: None), "called 'none'"),
        (hf_specdec.Mode(3, hf_specdec.SpeculativeConfig, lambda request, config: None), "called 3"),  # type: ignore
        (hf_specdec.Mode("mine", dict, lambda request, config: None), "a subclass of SpeculativeConfig"),  # type: ignore
    ],
)
def test_modes_that_cannot_be_registered(mode: hf_specdec.Mode, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hf_specdec.register_mode(mode)


def test_a_mode_that_builds_no_drafter() -> None:
    hf_specdec.register_mode(hf_specdec.Mode("empty", hf_specdec.SpeculativeConfig, lambda request, config: None))
    try:
        with pytest.raises(ConfigurationError, match="Mode 'empty' built None, which is no Drafter"):
            run(model_of("llama"), prompt(1), max_new_tokens=4, speculative_mode="empty")
    finally:
        hf_specdec.unregister_mode("empty")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": [1]}, "layers of a HiddenRequest must be a tuple"),
        ({"layers": 1}, "layers of a HiddenRequest"),
        ({"layers": ("1",)}, "layers of a HiddenRequest"),
        ({"prompt_positions": (5,)}, "count from the end"),
        ({"prompt_layers": (None,)}, "prompt_layers of a HiddenRequest"),
    ],
)
def test_requests_of_hidden_states_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hf_specdec.HiddenRequest(**fields)


def test_a_rule_that_is_not_registered() -> None:
    with pytest.raises(InvalidSettingError, match="acceptance must be 'coupled' or 'rejection' or 'typical'"):
        hf_specdec.SpeculativeConfig(acceptance="even")
