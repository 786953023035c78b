"""The round: propose, verify, walk, commit. It names no method.

budget   = controller.budget(...)
proposal = drafter.propose(context, budget)       a token tree per row
draft    = controller.size(proposal, ...)         the part that pays
scores   = verify(target, draft)                  ONE forward
verdict  = walk(draft, scores)                    one token after another
target.commit(verdict.kept)                       keep the accepted path's keys, roll the rest back
controller.observe(...), drafter.observe(...), stats.record_round(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..acceptance import AcceptanceRule
from ..config import SpeculativeConfig
from ..context import Context, Source
from ..draft import Budget, Draft, Scores, Verdict, check_draft
from ..drafter import Drafter
from ..host.caches import is_users_own
from ..host.generate import CACHE_KEY, optimized_for_decoding, output_of_generate, pad_token
from ..host.models import argument_names, embedding_size
from ..sampling import NoiseTape, Selection, generator_state, set_generator_state
from ..target import kv_cache as kv
from ..target.cached_model import CachedModel
from ..target.extras import Extras
from ..target.forward import Forwards
from ..target.support import Support
from .control import Controller
from .pace import Facts, choose_pace
from .stats import RowStats, SpeculationStats
from .transcript import Outputs, Transcript
from .verify import verify
from .walk import Walk


@dataclass(frozen=True)
class Task:
    """One speculative decoding of a batch: what `generate` prepared, and how it is sped up."""

    # ------------------------------ from `generate`
    model: Any
    # [B, P]
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: Any
    # for the model's forward, the cache included
    model_kwargs: dict[str, Any]
    streamer: Any | None

    # ------------------------------ how it is sped up
    mode_name: str
    drafter: Drafter
    rule: AcceptanceRule
    # settings of the mode
    config: SpeculativeConfig
    controller: Controller
    support: Support
    # what the forwards after the prompts' are given besides
    extras: Extras
    # [B, 1] or [D, B, 1], positions of the first of them; None where the model is given none
    next_positions: torch.Tensor | None = None
    # what an encoder was given and made of it; None where there is none
    source: Source | None = None
    # positions that the model has; None where they are not limited
    position_limit: int | None = None

    @property
    def cache(self) -> Any:
        """The target's KV cache."""
        return self.model_kwargs[CACHE_KEY]

    @property
    def mask(self) -> torch.Tensor | None:
        """`[B, P]`, where the prompts have tokens; None where everywhere."""
        return self.model_kwargs.get(argument_names(self.model).mask)


@dataclass(frozen=True)
class Decoded:
    """What came of a task."""

    # ids [B, T], or the output object that `return_dict_in_generate` asks for
    result: Any
    stats: SpeculationStats


def decode(task: Task) -> Decoded:
    """Decode as plain `generate` would, with the drafts of a drafter. Called from inside `generate`.

    Raises:
        DraftError: the drafter returned something malformed.
        UnsupportedError: the target or the drafter cannot take part after all.
    """
    decoding = Decoding(task)
    try:
        decoding.run()
    except BaseException:
        decoding.drop_uncommitted()
        raise
    finally:
        kv.record_past(task.cache, False)
        decoding.rewind_noise()
    if task.streamer is not None:
        task.streamer.end()
    sequences = decoding.transcript.sequences(decoding.pad_token)
    result: Any = sequences
    if task.generation_config.return_dict_in_generate:
        source = task.extras.source
        result = output_of_generate(task.cache, source, sequences=sequences, **decoding.outputs.packed())
        result.speculation = decoding.stats
    return Decoded(result, decoding.stats)


class Decoding:
    """A task while it runs.

    Args:
        task: what is to be decoded.
    """

    target: CachedModel

    def __init__(self, task: Task) -> None:
        self.task = task
        self.drafter, self.controller = task.drafter, task.controller
        do_sample = task.generation_config.do_sample
        tape = NoiseTape(task.input_ids.shape[1]) if do_sample and task.rule.reads_tape else None
        self.selection = Selection(task.processors, do_sample, tape)
        self.transcript = Transcript.of(task.input_ids, task.mask, task.generation_config.max_length)
        self.outputs = Outputs.wanted(task.generation_config)
        self.pad_token = pad_token(task.generation_config)
        self.returns_cache = bool(task.generation_config.return_dict_in_generate) or is_users_own(task.cache)
        self.pace = choose_pace(self._facts())
        if tape is not None:
            tape.alone = self.pace.reads_ahead
        self.walk = Walk(
            transcript=self.transcript,
            selection=self.selection,
            choose=task.rule.build(self.selection, task.config),
            criteria=task.criteria,
            pace=self.pace,
            outputs=self.outputs,
            streamer=task.streamer,
            pad_token=self.pad_token,
        )
        # shares the lists that the walk writes
        self.context = Context(
            tokens=self.transcript.tokens,
            prompt_lengths=[len(row) for row in self.transcript.tokens],
            finished=self.transcript.finished,
            device=task.input_ids.device,
            selection=self.selection,
            padded_prompts=task.input_ids.clone(),
            source=task.source,
        )
        self.stats = SpeculationStats(
            mode=task.mode_name,
            lossless=task.rule.lossless,
            calls=1,
            rows=[RowStats() for _ in range(self.transcript.batch_size)],
        )
        self._vocab_size = embedding_size(task.model)
        # images stand in a prompt as tokens that may have no embedding; drafters that copy from it meet them
        self._has_placeholders = any(token >= self._vocab_size for row in self.transcript.tokens for token in row)

    def _facts(self) -> Facts:
        task, mask, cache = self.task, self.task.mask, self.task.cache
        gaps = mask is not None and mask.dim() == 2 and bool((mask[:, 1:] < mask[:, :-1]).any())
        return Facts(
            batch_size=self.transcript.batch_size,
            processors_are_row_wise=self.selection.is_row_wise,
            criteria=tuple(type(criterion) for criterion in task.criteria),
            pads_finished=any(hasattr(criterion, "eos_token_id") for criterion in task.criteria),
            streams=task.streamer is not None,
            movable=task.support.movable and kv.is_movable(cache),
            windows_over_gaps=gaps and kv.has_windows(cache),
            returns_steps=self.outputs.any,
            returns_cache=self.returns_cache,
            drafter_in_step=self.drafter.rows_in_step,
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Decode until every row is finished."""
        started = perf_counter()
        with self._undisturbed():
            self.drafter.start(self._shown())
        self.walk(Draft.empty(self.context.roots), self._prefill())
        for row in self.stats.rows:
            row.tokens += 1
        self.stats.other_seconds += perf_counter() - started
        with optimized_for_decoding(self.task.model):
            while not all(self.transcript.finished):
                self._round()
            if self.returns_cache:
                self.stats.catch_up_forwards += self.target.catch_up()

    def _round(self) -> None:
        began = perf_counter()
        proposal = self._propose(self._budget())
        draft = self._size(proposal)
        drafted, replayed = perf_counter(), self.target.replayed
        # what is left of a plain step whose lower half ran says nothing about plain steps
        is_rest = self.target.lower_half_ran and draft.is_empty
        scores = verify(self.target, draft, self.drafter.hidden.layers, self.outputs)
        _wait_for(scores.logits)
        verified = perf_counter()
        verdict = self.walk(draft, scores)
        self._commit(verdict)
        verify_seconds = None if is_rest else verified - drafted
        self.controller.observe(proposal, draft, verdict, drafted - began, verify_seconds)
        with self._undisturbed():
            self.drafter.observe(self._shown(), draft, scores, verdict)
        self.stats.record_round(draft, verdict, replayed)
        self.stats.draft_seconds += drafted - began
        self.stats.verify_seconds += verified - drafted
        self.stats.other_seconds += perf_counter() - verified

    # ------------------------------------------------------------------ its parts

    def _prefill(self) -> Scores:
        """The prompts' forward, as plain `generate` makes it; its last position is the first round's root."""
        task, request = self.task, self.drafter.hidden
        forwards = Forwards(task.model)
        output, cache = forwards.prompt(
            task.input_ids, task.generation_config, task.model_kwargs, request.of_prompt, request.prompt_positions
        )
        kv.record_past(cache, True)
        self.target = CachedModel.after_prompts(
            task.model,
            task.support,
            cache,
            task.mask,
            task.next_positions,
            forwards,
            task.extras,
            task.input_ids.shape[0],
        )
        self.stats.prompt_forwards = 1
        self.context.vocab_size = output.logits.shape[-1]
        scores = Scores(
            logits=output.logits[:, -1:],
            rows=list(self.target.rows),
            hidden=output.hidden,
            hidden_states=output.hidden_states if self.outputs.hidden_states is not None else None,
            attentions=output.attentions if self.outputs.attentions is not None else None,
            cross_attentions=output.cross_attentions if self.outputs.attentions is not None else None,
        )
        with self._undisturbed():  # (what it does to the logits is its own affair)
            self.drafter.attach(self.target, replace(scores, logits=scores.logits.clone()))
        return scores

    def _budget(self) -> Budget:
        """How much may be drafted: what the controller allows, and what a static cache has room for."""
        replayed = self.target.replayed if self.task.support.replays else None
        budget, free = self.controller.budget(self._rooms(), self.task.support.trees, replayed), self._free_slots()
        if free is not None and free < budget.nodes:
            return replace(budget, nodes=free, depth=[min(depth, free) for depth in budget.depth])
        return budget

    def _propose(self, budget: Budget) -> Draft:
        """The drafter's proposal, checked, without what could not be committed or verified."""
        roots = self.context.roots
        asked = self.drafter.drafts_for_free or not budget.free_only
        if not asked or not any(depth > 0 for depth in budget.depth):
            return Draft.empty(roots)
        with self._undisturbed():
            proposal = self.drafter.propose(self._shown(), budget)
        if self._has_placeholders and isinstance(proposal, Draft):
            proposal = proposal.known_to(self._vocab_size)
        check_draft(proposal, roots, self._vocab_size)
        proposal = proposal.within(self._rooms())
        return proposal if self.task.support.trees else proposal.best_chain()

    def _size(self, proposal: Draft) -> Draft:
        """The part of a proposal that is verified."""
        running, free = [not finished for finished in self.transcript.finished], self._free_slots()
        draft = self.controller.size(proposal, running, proposal.width - 1 if free is None else free)
        if self.pace.lockstep and self.pace.pads_finished and not all(running):
            return self._with_padding(draft)
        return draft

    def _commit(self, verdict: Verdict) -> None:
        """Keep the keys of root and accepted tokens, save those of the last committed token."""
        rows, finished = self.target.rows, self.transcript.finished
        kept = [verdict.kept[row] for row in rows]
        idle = set() if self.pace.lockstep else {i for i, row in enumerate(rows) if finished[row]}
        if len(idle) == len(kept):
            return
        self.target.commit(kept, idle)
        if idle and self.target.capacity is None:
            self.target.select_rows([i for i in range(len(kept)) if i not in idle])

    # ------------------------------------------------------------------ room, padding, generators

    def _rooms(self) -> list[int]:
        """Per row, the deepest drafted token that could still be committed and has a position; -1 once finished."""
        return [self._room(row) for row in range(self.transcript.batch_size)]

    def _room(self, row: int) -> int:
        if self.transcript.finished[row]:
            return -1
        length = self.transcript.lengths[row]
        room = self.task.generation_config.max_length - length - 1
        if self.task.position_limit is not None:
            # the root's position is that of the last committed token
            position = self.target.root_positions[self.target.rows.index(row)]
            room = min(room, self.task.position_limit - 1 - position)
        return max(0, room)

    def _free_slots(self) -> int | None:
        """Slots that a static cache has besides the root's; None where the cache grows."""
        capacity = self.target.capacity
        return None if capacity is None else max(0, capacity - self.target.past_slots - 1)

    def _with_padding(self, draft: Draft) -> Draft:
        """Finished rows go on with padding, as plain decoding feeds it, for as long as the others do."""
        width, finished = draft.width, self.transcript.finished

        def unless_finished(rows: list, instead: Any) -> list:
            return [instead(row) if done else row for row, done in zip(rows, finished, strict=True)]

        return Draft(
            tokens=unless_finished(draft.tokens, lambda row: [row[0], *[self.pad_token] * (width - 1)]),
            parents=unless_finished(draft.parents, lambda row: list(range(-1, width - 1))),
            confidence=None
            if draft.confidence is None
            else unless_finished(draft.confidence, lambda row: [1.0] * width),
            passenger=None
            if draft.passenger is None
            else unless_finished(draft.passenger, lambda row: [False] * width),
            q=draft.q,
        )

    def _shown(self) -> Context:
        """The context as a drafter gets it: what it does to it is its own affair."""
        context = self.context
        return replace(context, tokens=[list(row) for row in context.tokens], finished=list(context.finished))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Leave the generators where plain decoding has them, whatever a drafter draws, unless drafts are drawn."""
        if self.context.draws_own_noise:
            yield
            return
        tape = self.selection.tape
        device = self.context.device
        before, on_device = generator_state(torch.device("cpu")), generator_state(device)
        try:
            yield
        finally:
            set_generator_state(torch.device("cpu"), before)
            if device.type != "cpu":
                set_generator_state(device, on_device)
            if tape is not None and tape.alone:
                tape.catch_up()

    def drop_uncommitted(self) -> None:
        """Take drafted tokens out of the cache, which may be the user's own: for exceptions in mid-round."""
        if hasattr(self, "target"):  # the prompts have been read
            self.target.drop_uncommitted()

    def rewind_noise(self) -> None:
        """Put the generator where as many steps of plain sampling leave it."""
        if self.selection.tape is not None:
            self.selection.tape.rewind(self.transcript.steps)


def _wait_for(tensor: torch.Tensor) -> None:
    """Let timings of accelerators mean something: the walk would wait here anyway."""
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
