"""How the rows of a batch advance: each at its own pace, or all in lockstep. Pure: decided once per call, from facts.

Own pace: every row commits what it accepts. Lockstep: all rows commit the same number of tokens per round, as many as
the row that accepts least. Rows advance at their own pace where each can be judged by itself. Unknown processors and
criteria, and whatever returns something per step for the whole batch, see the batch as plain decoding shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers.generation import stopping_criteria as host_criteria

# criteria that judge every row by itself and hold no memory
ROW_WISE_CRITERIA = (
    host_criteria.MaxLengthCriteria,
    host_criteria.MaxTimeCriteria,
    host_criteria.EosTokenCriteria,
    host_criteria.StopStringCriteria,
)
# those of them that end all rows together
LENGTH_CRITERIA = (host_criteria.MaxLengthCriteria, host_criteria.MaxTimeCriteria)


@dataclass(frozen=True)
class Facts:
    """What the pace depends on."""

    batch_size: int
    # whether every logits processor is known to treat each row by itself, without a memory
    processors_are_row_wise: bool
    # the classes of the stopping criteria
    criteria: tuple[type, ...]
    # whether finished rows are padded, as they are where there is an EOS
    pads_finished: bool
    streams: bool
    # whether rows may keep different slots: by the self-test, and by the kinds of layers of the cache
    movable: bool
    # whether a layer counts a window in slots, and a prompt has gaps that would close up
    windows_over_gaps: bool
    # whether scores, hidden states and the like are returned per step
    returns_steps: bool
    # whether somebody else sees the cache
    returns_cache: bool
    # whether the drafter can only draft for rows that have advanced equally
    drafter_in_step: bool = False


@dataclass(frozen=True)
class Pace:
    """How a call's rows advance."""

    lockstep: bool
    # finished rows go on with padding until the last one is done
    pads_finished: bool
    # whether nothing but sampling draws from the generator, so that noise may be read ahead of its step
    reads_ahead: bool


def choose_pace(facts: Facts) -> Pace:
    """The pace of a call."""
    judged_alone = facts.processors_are_row_wise and _all_of(facts.criteria, ROW_WISE_CRITERIA) and not facts.streams
    # without an EOS, finished rows go on with real tokens until the last row is done
    ends_together = facts.pads_finished or _all_of(facts.criteria, LENGTH_CRITERIA)
    own_pace = (
        judged_alone
        and ends_together
        and facts.movable
        and not facts.windows_over_gaps
        and not facts.returns_steps
        and not facts.returns_cache
        and not facts.drafter_in_step
    )
    return Pace(
        lockstep=facts.batch_size == 1 or not own_pace,
        pads_finished=facts.pads_finished,
        reads_ahead=judged_alone,
    )


def _all_of(kinds: Iterable[type], known: tuple[type, ...]) -> bool:
    """Whether every class is exactly one of those known (a subclass may do anything)."""
    return all(kind in known for kind in kinds)
