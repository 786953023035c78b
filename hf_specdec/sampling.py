"""Sampling as an argmax over a noise tape, and how logits become a token.

`torch.multinomial(p, 1)` draws `E ~ Exponential(1)` for every entry and returns `argmax(p / E)`. Keeping the matrix
`E_t` of every step t makes the sampled token of any drafted continuation a function of its scores alone, so greedy
decoding and sampling are verified by the same rule, and a seed gives the text that plain sampling gives.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from functools import cache, cached_property

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host

# Processors that look at the scores alone: the same answer for any row, alone or in a batch, in any order.
_CONTEXT_FREE = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
)
# Processors without memory that treat every row by itself: they may be called on some rows, and on drafts.
_ROW_WISE = (
    *_CONTEXT_FREE,
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "ExponentialDecayLengthPenalty",
)


def _named(names: tuple[str, ...]) -> frozenset[type]:
    """The classes of transformers by these names; versions differ in which exist."""
    return frozenset(getattr(host, name) for name in names if hasattr(host, name))


CONTEXT_FREE: frozenset[type] = _named(_CONTEXT_FREE)
ROW_WISE: frozenset[type] = _named(_ROW_WISE)


def all_of(processors: LogitsProcessorList, kinds: frozenset[type]) -> bool:
    """Whether every processor is exactly one of `kinds` (a subclass may do anything, so it does not count)."""
    return all(type(processor) in kinds for processor in processors)


class NoiseTape(LogitsProcessor):
    r"""Sampling as greedy decoding: `scores -> softmax(scores) / E_t`.

    Appended to the processors of greedy decoding, it makes `argmax` return what `torch.multinomial` would have
    drawn from the same generator. One `[B, V]` float32 matrix is drawn per step, in step order, from the default
    generator of the scores' device; steps may be read ahead of their time and `rewind` undoes that.

    Args:
        prompt_length: columns of `input_ids` before the first generated token.

    Reference: the exponential race, e.g. arXiv:2408.07978 (drafts coupled with their target).
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.alone = False  # nothing else draws from the generator, so steps may be drawn ahead of their time
        self._shape: torch.Size | None = None
        self._device: torch.device | None = None
        self._noise: dict[int, torch.Tensor] = {}  # step -> [B, V]
        self._states: list[torch.Tensor] = []  # generator state before step 0, after step 0, after step 1, ...

    @property
    def ready(self) -> bool:
        """Whether the tape knows its shape, which the first scores give."""
        return self._shape is not None

    def noise(self, step: int) -> torch.Tensor:
        """`E_step`, float32 `[B, V]`, drawing all steps up to it that were not drawn yet."""
        assert self._shape is not None, "the first scores give the tape its shape"
        assert self._device is not None
        while len(self._states) <= step + 1:
            if not self._states:
                self._states.append(generator_state(self._device))
            elif self.alone:
                set_generator_state(self._device, self._states[-1])
            drawn = torch.empty(self._shape, dtype=torch.float32, device=self._device).exponential_(1)
            self._noise[len(self._states) - 1] = drawn
            self._states.append(generator_state(self._device))
        return self._noise[step]

    def perturb(self, scores: torch.Tensor, step: int, rows: list[int] | None = None) -> torch.Tensor:
        """`softmax(scores) / E_step` for scores `[len(rows), V]` of the given rows (None: all of them).

        Raises:
            RuntimeError: the scores hold NaN or infinity, as `torch.multinomial` does.
        """
        noise, probabilities = self.noise(step), scores.softmax(dim=-1)
        if bool(probabilities[:, 0].isnan().any()):  # one is enough to make the whole row so
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return probabilities / (noise if rows is None else noise[rows])

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.shape_from(scores)
        step = input_ids.shape[1] - self.prompt_length
        perturbed = self.perturb(scores, step)
        self.release(step)
        return perturbed  # type: ignore[return-value]

    def shape_from(self, scores: torch.Tensor) -> None:
        """Take shape `[B, V]` and device from the first scores of the whole batch."""
        if self._shape is None:
            self._shape, self._device = scores.shape, scores.device

    def release(self, before: int) -> None:
        """Forget the noise of the steps before `before`: every row has passed them."""
        for step in [step for step in self._noise if step < before]:
            del self._noise[step]

    def catch_up(self) -> None:
        """Put the generator behind the last step drawn."""
        if self._device is not None and self._states:
            set_generator_state(self._device, self._states[-1])

    def rewind(self, steps: int) -> None:
        """Put the generator where it is after exactly `steps` draws, as plain sampling leaves it.

        Where nothing was drawn ahead it is there already, and others may have drawn since.
        """
        if self._device is not None and len(self._states) > steps + 1:
            set_generator_state(self._device, self._states[steps])


def generator_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Put the default generator of a device into a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Leave the default generators, the CPU's and the device's, as they are, whatever is drawn inside."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)  # type: ignore[list-item]


@cache
def tape_matches_multinomial(device: torch.device, trials: int = 8, vocabulary: int = 2048) -> bool:
    """Whether `torch.multinomial` on this device and torch version is the exponential race that the tape plays.

    The device's generator is left as it was.
    """
    before = generator_state(device)
    try:
        with torch.random.fork_rng(devices=[]):
            generator = torch.Generator("cpu").manual_seed(0)
            logits = torch.randn(2, vocabulary, generator=generator, device="cpu").to(device)
        probabilities = logits.softmax(-1)
        for _ in range(trials):
            start = generator_state(device)
            expected = torch.multinomial(probabilities, 1).squeeze(1)
            end = generator_state(device)
            set_generator_state(device, start)
            tape = NoiseTape(prompt_length=0)
            tape.shape_from(logits)
            token = tape.perturb(logits, step=0).argmax(-1)
            if not torch.equal(token, expected) or not torch.equal(generator_state(device), end):
                return False
        return True
    finally:
        set_generator_state(device, before)


class Selection:
    """How the target's logits become its token: the processors of the call, then argmax or sampling.

    Args:
        processors: the processors plain `generate` would call, in order.
        do_sample: sample, or take the argmax.
        tape: the noise of sampling; None when greedy, or when the acceptance rule draws its own.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, tape: NoiseTape | None) -> None:
        self.processors = processors
        self.do_sample = do_sample
        self.tape = tape

    @cached_property
    def is_row_wise(self) -> bool:
        """Whether the processors may be called on some rows only, and on drafts that may be thrown away."""
        return all_of(self.processors, ROW_WISE)

    @cached_property
    def is_context_free(self) -> bool:
        """Whether the processors look at nothing but the scores."""
        return all_of(self.processors, CONTEXT_FREE)

    @property
    def readable_tape(self) -> NoiseTape | None:
        """The tape, where drafts may read it before its time.

        An unknown processor, criterion or streamer might draw from the generator itself, between two steps: then
        nothing may be drawn ahead of it.
        """
        return self.tape if self.tape is not None and self.tape.ready and self.tape.alone else None

    def process(self, ids: torch.Tensor, scores: torch.Tensor, rows: list[int] | None) -> torch.Tensor:
        """Scores `[k, V]` after the processors, for contexts `ids [k, T]` of the given rows (None: the whole batch)."""
        if rows is None:
            return self.processors(ids, scores)  # type: ignore[arg-type]
        for processor in self.processors:
            scores = _for_rows(processor, rows)(ids, scores)
        return scores


def _for_rows(processor: LogitsProcessor, rows: list[int]) -> LogitsProcessor:
    """The processor as it treats these rows of the batch: some hold a length per row."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(lengths, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = lengths[rows]  # type: ignore[attr-defined]
    return processor
