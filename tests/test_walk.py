"""The walk and the pace, without a model: scores are tables of the token that the target says after each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import stopping_criteria as host_criteria

from hf_specdec.acceptance import Choice, Offer, check_choices
from hf_specdec.decoding.pace import Facts, Pace, choose_pace
from hf_specdec.decoding.transcript import Outputs, Transcript
from hf_specdec.decoding.walk import Walk
from hf_specdec.draft import Draft, Scores
from hf_specdec.errors import AcceptanceRuleError
from hf_specdec.rules.coupled import Coupled
from hf_specdec.sampling import NoiseTape, Selection

VOCABULARY, EOS = 12, 11


def following(token: int) -> int:
    """The target says the numbers in order, up to the EOS."""
    return min(token + 1, EOS)


def scored(draft: Draft, rows: list[int] | None = None) -> Scores:
    rows = list(range(draft.batch_size)) if rows is None else rows
    logits = torch.zeros(len(rows), draft.width, VOCABULARY)
    for place, row in enumerate(rows):
        for node, token in enumerate(draft.tokens[row]):
            logits[place, node, following(token)] = 5.0
    return Scores(logits=logits, rows=rows)


class Noting:
    """A criterion that ends rows at the EOS or at a length, and notes what it is asked about."""

    def __init__(self, length: int = 99) -> None:
        self.length, self.asked = length, []  # type: ignore[var-annotated]

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.asked.append(ids.tolist())
        return (ids[:, -1] == EOS) | (ids.shape[1] >= self.length)


def walking(
    prompts: list[list[int]], lockstep: bool = False, processors: list[LogitsProcessor] | None = None, **fields: Any
) -> Walk:
    ids = torch.tensor(prompts)
    selection = Selection(LogitsProcessorList(processors or []), do_sample=False, tape=None)
    pace = Pace(lockstep=lockstep, pads_finished=True, reads_ahead=not lockstep)
    given = {"criteria": Noting(), "choose": Coupled(selection), "pace": pace, **fields}
    return Walk(Transcript.of(ids, None, 64), selection, **given)


def test_a_right_draft_is_committed_whole_and_one_token_more() -> None:
    walk = walking([[0, 1]])
    verdict = walk(draft := Draft.chains([1], [[2, 3, 4]]), scored(draft))
    assert verdict.committed == [[2, 3, 4, 5]]
    assert verdict.accepted == [3]
    assert verdict.kept == [[0, 1, 2, 3]]
    assert walk.transcript.tokens == [[0, 1, 2, 3, 4, 5]]


def test_a_wrong_turn_ends_the_round() -> None:
    walk = walking([[0, 1]])
    verdict = walk(draft := Draft.chains([1], [[2, 9, 4]]), scored(draft))
    assert verdict.committed == [[2, 3]]
    assert verdict.kept == [[0, 1]]


def test_the_branch_with_the_targets_token_is_taken() -> None:
    #  1 -+- 7 --- 8
    #     +- 2 -+- 5
    #           +- 3
    draft = Draft(tokens=[[1, 7, 2, 8, 5, 3]], parents=[[-1, 0, 0, 1, 2, 2]])
    verdict = walking([[0, 1]])(draft, scored(draft))
    assert verdict.committed == [[2, 3, 4]]
    assert verdict.kept == [[0, 2, 5]]


def test_passengers_are_never_accepted() -> None:
    draft = Draft(tokens=[[1, 2]], parents=[[-1, 0]], passenger=[[False, True]])
    verdict = walking([[0, 1]])(draft, scored(draft))
    assert (verdict.committed, verdict.accepted) == ([[2]], [0])


def test_rows_advance_at_their_own_pace() -> None:
    walk = walking([[0, 1], [4, 5]])
    verdict = walk(draft := Draft.chains([1, 5], [[2, 3], [9, 9]]), scored(draft))
    assert verdict.committed == [[2, 3, 4], [6]]
    assert walk.transcript.lengths == [5, 3]
    # rows of one length are asked about together, others by themselves
    assert walk.criteria.asked == [[[0, 1, 2], [4, 5, 6]], [[0, 1, 2, 3]], [[0, 1, 2, 3, 4]]]  # type: ignore[attr-defined]


def test_in_lockstep_the_row_that_accepts_least_decides() -> None:
    walk = walking([[0, 1], [4, 5]], lockstep=True)
    verdict = walk(draft := Draft.chains([1, 5], [[2, 3, 4], [6, 9, 9]]), scored(draft))
    assert verdict.committed == [[2, 3], [6, 7]]
    assert verdict.accepted == [2, 1]
    assert verdict.kept == [[0, 1], [0, 1]]


def test_a_row_stops_at_its_eos_whatever_was_drafted() -> None:
    walk = walking([[8, 9], [0, 1]])
    verdict = walk(draft := Draft.chains([9, 1], [[10, 11, 11, 11], [2, 3, 4, 5]]), scored(draft))
    assert verdict.committed == [[10, 11], [2, 3, 4, 5, 6]]
    assert walk.transcript.finished == [True, False]
    # a finished row is no longer carried: the next draft is scored without it
    verdict = walk(draft := Draft.chains([11, 6], [[], [7]]), scored(draft, rows=[1]))
    assert verdict.committed == [[], [7, 8]]
    assert verdict.kept == [[], [0, 1]]
    assert walk.transcript.sequences(pad_token=0)[0].tolist() == [8, 9, 10, 11, 0, 0, 0, 0, 0]


def test_finished_rows_go_on_with_padding_in_lockstep() -> None:
    walk = walking([[9, 10], [0, 1]], lockstep=True, pad_token=0)
    walk(draft := Draft.empty([10, 1]), scored(draft))
    assert walk.transcript.finished == [True, False]
    verdict = walk(draft := Draft.chains([11, 2], [[0], [3]]), scored(draft))
    assert verdict.committed == [[], [3, 4]]
    assert walk.transcript.tokens[0] == [9, 10, 11, 0, 0]


def test_processors_are_called_once_per_token_with_what_was_committed() -> None:
    class Seeing(LogitsProcessor):
        seen: list[list[list[int]]] = []  # noqa: RUF012

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            self.seen.append(input_ids.tolist())
            return scores

    processor = Seeing()
    walk = walking([[0, 1]], processors=[processor])
    walk(draft := Draft.chains([1], [[2, 9, 9]]), scored(draft))
    assert processor.seen == [[[0, 1]], [[0, 1, 2]]]


def test_the_rule_sees_the_children_of_the_node_that_was_reached() -> None:
    offered = []

    def choose(scores: torch.Tensor, offers: Any, step: int, rows: Any) -> list[Choice]:
        offered.append((step, rows, list(offers[0].tokens), None if offers[0].q is None else offers[0].q[0].tolist()))
        return [Choice(2, offers[0].child(2))]

    q = torch.rand(1, 3, VOCABULARY)
    draft = Draft(tokens=[[1, 2, 3]], parents=[[-1, 0, 1]], q=q)
    verdict = walking([[0, 1]], choose=choose)(draft, scored(draft))
    assert offered == [(0, None, [2], q[0, 1].tolist()), (1, None, [3], q[0, 2].tolist())]
    assert verdict.committed == [[2, 2]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (None, "a list of 1 choices, got None"),
        ([], "a list of 1 choices"),
        ([Choice(-1, None)], "no token of a vocabulary of 97"),
        ([Choice(97, None)], "no token of a vocabulary of 97"),
        ([Choice(torch.tensor(5), None)], "no token of"),
        ([(5, None)], "no token of"),
        ([Choice(5, 3)], r"the nodes offered, with their tokens, were \{1: 5, 2: 6\}"),
        ([Choice(5, 2)], "the nodes offered"),
    ],
)
def test_choices_of_a_rule_are_checked(choices: Any, message: str) -> None:
    offers = [Offer(nodes=[1, 2], tokens=[5, 6])]
    with pytest.raises(AcceptanceRuleError, match=message):
        check_choices(choices, offers, 97)
    check_choices([Choice(6, 2)], offers, 97)
    check_choices([Choice(5, None)], offers, 97)


def test_streamed_and_returned_steps() -> None:
    class Streamer:
        got: list[list[int]] = []  # noqa: RUF012

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.tolist())

    streamer, outputs = Streamer(), Outputs(scores=[], logits=[])
    walk = walking([[0, 1]], lockstep=True, streamer=streamer, outputs=outputs)
    walk(draft := Draft.chains([1], [[2, 3]]), scored(draft))
    assert streamer.got == [[2], [3], [4]]
    assert outputs.scores is not None
    assert [int(step.argmax()) for step in outputs.scores] == [2, 3, 4]


def test_noise_that_every_row_has_passed_is_forgotten() -> None:
    tape = NoiseTape(prompt_length=2)
    selection = Selection(LogitsProcessorList(), do_sample=True, tape=tape)
    tape.alone = True
    walk = replace(walking([[0, 1], [4, 5]]), selection=selection, choose=Coupled(selection))
    draft = Draft.chains([1, 5], [[], []])
    walk(draft, scored(draft))
    before = tape.noise(1)
    assert tape.noise(1) is before, "the noise of steps to come is kept"
    with pytest.raises(KeyError):
        tape.noise(0)


# ---------------------------------------------------------------- the pace

FACTS = Facts(
    batch_size=3,
    processors_are_row_wise=True,
    criteria=(host_criteria.MaxLengthCriteria, host_criteria.EosTokenCriteria),
    pads_finished=True,
    streams=False,
    movable=True,
    windows_over_gaps=False,
    returns_steps=False,
    returns_cache=False,
)


class Custom(host_criteria.MaxLengthCriteria):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("changed", "lockstep", "reads_ahead"),
    [
        ({}, False, True),
        ({"batch_size": 1}, True, True),
        ({"processors_are_row_wise": False}, True, False),
        ({"criteria": (Custom,)}, True, False),
        ({"streams": True}, True, False),
        ({"movable": False}, True, True),
        ({"windows_over_gaps": True}, True, True),
        ({"returns_steps": True}, True, True),
        ({"returns_cache": True}, True, True),
        # rows can end apart, and there is nothing to pad the first with
        ({"pads_finished": False}, True, True),
        ({"pads_finished": False, "criteria": (host_criteria.MaxLengthCriteria,)}, False, True),
    ],
)
def test_the_pace_follows_from_the_facts(changed: dict[str, Any], lockstep: bool, reads_ahead: bool) -> None:
    facts = replace(FACTS, **changed)
    assert choose_pace(facts) == Pace(lockstep, facts.pads_finished, reads_ahead)


def test_a_transcript_takes_memory_as_it_grows() -> None:
    transcript = Transcript.of(torch.tensor([[5, 6]]), None, max_length=10**9)
    assert transcript.ids.shape[1] < 10_000
    for token in range(9_000):
        transcript.append(0, token)
    assert transcript.view(None, 9_002)[0, 2:].tolist() == list(range(9_000))
