"""Measuring: how much faster a mode gives plain decoding's output here, and whether it is plain decoding's output.

Cases are compared in one process, in turns on the same prompts, because the speed of a machine drifts by more than most
modes gain. Seconds are those of whole `generate` calls, the prompt's forward included. Tokens are counted from ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..decoding.stats import record
from ..errors import (
    AdapterError,
    ConfigurationError,
    IncompatibleVocabularyError,
    UnsupportedError,
)
from ..generation import NO_MODE
from ..modes import get_mode, mode_names
from .loading import describe
from .report import (
    PLAIN,
    Batch,
    Case,
    Environment,
    Measurement,
    Prompt,
    Report,
    Settings,
    Skipped,
    count_differing,
    count_tokens,
)

# a mode that raises one of these cannot run here; anything else is a failure of the mode
_REFUSALS = (AdapterError, ConfigurationError, UnsupportedError, IncompatibleVocabularyError)

# called before every run: runs done, runs in all, what comes next
Progress = Callable[[int, int, str], None]


# ---------------------------------------------------------------- batches and cases


def make_batches(prompts: Sequence[Prompt], size: int) -> list[Batch]:
    """Batches of at most `size` prompts, never of two tasks."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    return [
        Batch(task, tuple(group[start : start + size]))
        for task, group in by_task.items()
        for start in range(0, len(group), size)
    ]


def make_cases(
    settings: Settings,
    modes: Sequence[str] | None = None,
    *,
    assistant: Any | None = None,
    transformers_own: bool = False,
) -> tuple[list[Case], list[Skipped]]:
    """The cases to compare, plain decoding first, and those that lack something.

    Args:
        settings: of the run.
        modes: names of modes that must run; None takes every registered mode that can.
        assistant: draft model for the modes that need one.
        transformers_own: whether transformers' own prompt lookup runs too, and with an assistant its assisted decoding.

    Raises:
        UnknownModeError: a name of `modes` names none.
        ConfigurationError: a mode of `modes` needs an assistant.
    """
    cases, skipped = [Case(PLAIN, {"speculative_mode": NO_MODE})], []
    for name in mode_names() if modes is None else dict.fromkeys(modes):
        mode = get_mode(name)
        arguments: dict[str, Any] = {"speculative_mode": name}
        if settings.num_draft_tokens is not None:
            arguments["speculative_config"] = {"num_draft_tokens": settings.num_draft_tokens}
        if mode.needs_assistant:
            if assistant is None:
                reason = "it needs a draft model; give --assistant or --assistant-layers."
                if modes is not None:
                    raise ConfigurationError(f"Mode {name!r} cannot run: {reason}")
                skipped.append(Skipped(name, reason))
                continue
            arguments["assistant_model"] = assistant
        cases.append(Case(name, arguments, refusals=_REFUSALS if modes is None else ()))
    if transformers_own:
        own: dict[str, dict[str, Any]] = {"transformers lookup": {"prompt_lookup_num_tokens": 10}}
        if assistant is not None:
            own["transformers assisted"] = {"assistant_model": assistant}
        for name, arguments in own.items():
            arguments = {**arguments, "speculative_mode": NO_MODE}
            # where they sample, they promise plain decoding's distribution but not its text
            cases.append(Case(name, arguments, promises_plain=not settings.samples, refusals=(ValueError,)))
    return cases, skipped


# ---------------------------------------------------------------- measuring


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    cases: Sequence[Case],
    settings: Settings,
    *,
    environment: Environment | None = None,
    skipped: Sequence[Skipped] = (),
    progress: Progress = lambda done, total, label: None,
) -> Report:
    """Run every case on every batch of prompts, in turns, and compare the outputs with plain decoding's.

    Args:
        model: the target model.
        tokenizer: its tokenizer, padding on the left. Where it has a chat template, every prompt is a user's message.
        prompts: what to continue.
        cases: from `make_cases`; one of them is plain decoding.
        settings: what they have in common.
        environment: from `describe`; None describes the model without a name.
        skipped: cases that lack something, to be reported.
        progress: told before every run.
    """
    if PLAIN not in [case.name for case in cases]:
        raise ConfigurationError(f"Nothing to compare with: no case is named {PLAIN!r}.")
    batches = make_batches(prompts, settings.batch_size)
    if not batches:
        raise ConfigurationError("There are no prompts to measure on.")
    runner = _Runner(model, tokenizer, settings)
    running, refused = _warm_up(runner, cases, batches, progress)
    done, total = len(cases), len(cases) + len(running) * len(batches) * settings.repeats
    measurements: list[Measurement] = []
    for index, batch in enumerate(batches):
        inputs = runner.encode(batch)
        runs: list[tuple[int, _Run]] = []
        for repeat in range(settings.repeats):
            shift = (index + repeat) % len(running)  # nobody always runs first, or always after the same other
            for case in running[shift:] + running[:shift]:
                progress(done, total, f"{batch.task}: {case.name}")
                runs.append((repeat, runner.run(case, inputs)))
                done += 1
        plain = next(run.rows for _, run in runs if run.case == PLAIN)
        measurements += [run.measurement(batch.task, index, repeat, plain, runner.eos) for repeat, run in runs]
    progress(done, total, "done")
    order = [case.name for case in running]
    return Report(
        environment=environment or describe(model, type(model).__name__),
        settings=settings,
        cases=tuple(running),
        measurements=tuple(sorted(measurements, key=lambda m: (m.batch, order.index(m.case), m.repeat))),
        skipped=(*skipped, *refused),
    )


def _warm_up(
    runner: _Runner, cases: Sequence[Case], batches: Sequence[Batch], progress: Progress
) -> tuple[list[Case], list[Skipped]]:
    """One call of every case that is not timed: those that can run here, and those that cannot.

    The first call of a case is slow (kernels are chosen, memory is taken) and shows whether it can run at all. It is
    made on the largest batch: what cannot do batches says so here.
    """
    largest = max(batches, key=lambda batch: len(batch.prompts))
    total = len(cases) * (1 + len(batches) * runner.repeats)
    running: list[Case] = []
    refused: list[Skipped] = []
    for done, case in enumerate(cases):
        progress(done, total, f"warming up {case.name}")
        try:
            runner.run(case, runner.encode(largest))
        except case.refusals as error:
            refused.append(Skipped(case.name, str(error).partition("\n")[0]))
        else:
            running.append(case)
    return running, refused


@dataclass(frozen=True)
class _Run:
    """One `generate` call, before its output is compared."""

    case: str
    seconds: float
    # generated ids, [B, T] as lists
    rows: list[list[int]]
    accepted: int | None
    rounds: int | None

    def measurement(
        self, task: str, batch: int, repeat: int, plain: Sequence[Sequence[int]], eos: Iterable[int]
    ) -> Measurement:
        return Measurement(
            case=self.case,
            task=task,
            batch=batch,
            repeat=repeat,
            seconds=self.seconds,
            rows=len(self.rows),
            tokens=count_tokens(self.rows, eos),
            differing_rows=count_differing(self.rows, plain),
            accepted=self.accepted,
            rounds=self.rounds,
        )


class _Runner:
    """Runs cases on one model."""

    def __init__(self, model: Any, tokenizer: Any, settings: Settings) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, settings.seed
        self.repeats = settings.repeats
        self.arguments: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "do_sample": settings.samples,
            "return_dict_in_generate": False,
        }
        for name in ("temperature", "top_p"):
            if getattr(settings, name) is not None:
                self.arguments[name] = getattr(settings, name)
        if model.generation_config.pad_token_id is None:
            self.arguments["pad_token_id"] = tokenizer.pad_token_id
        eos = model.generation_config.eos_token_id
        self.eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def encode(self, batch: Batch) -> Any:
        texts = [prompt.text for prompt in batch.prompts]
        is_chat = bool(self.tokenizer.chat_template)
        if is_chat:
            texts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        # the template has already written the special tokens
        encoded = self.tokenizer(
            texts,
            return_tensors="pt",
            padding=len(texts) > 1,
            add_special_tokens=not is_chat,
            return_token_type_ids=False,
        )
        return encoded.to(self.model.device)

    def run(self, case: Case, inputs: Any) -> _Run:
        import torch

        torch.manual_seed(self.seed)
        with record() as stats:
            self._synchronize()
            start = perf_counter()
            output = self.model.generate(**inputs, **self.arguments, **case.arguments)
            self._synchronize()
            seconds = perf_counter() - start
        total = stats.total
        return _Run(
            case=case.name,
            seconds=seconds,
            rows=output[:, inputs["input_ids"].shape[1] :].tolist(),
            accepted=total.accepted if stats.calls else None,
            rounds=total.rounds if stats.calls else None,
        )

    def _synchronize(self) -> None:
        if self.model.device.type != "cpu":
            import torch

            torch.accelerator.synchronize(self.model.device)
