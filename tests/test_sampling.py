"""The noise tape and the allow-lists."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import model_of, prompt, run
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as host

from hf_specdec import NoiseTape, sampling
from hf_specdec.host.generate import CACHE_KEY
from hf_specdec.sampling import Selection, all_of, tape_matches_multinomial


@pytest.mark.parametrize("batch", [1, 3])
def test_the_tape_makes_greedy_decoding_sample(batch: int) -> None:
    """As a processor of plain greedy decoding it gives the text, and leaves the generator, of plain sampling."""
    model, inputs = model_of("llama"), prompt(batch, padding=2)
    for seed in range(5):
        sampled, state = run(model, inputs, seed=seed, max_new_tokens=20, do_sample=True, top_k=0)
        tape = LogitsProcessorList([NoiseTape(prompt_length=12)])
        played, tape_state = run(model, inputs, seed=seed, max_new_tokens=20, do_sample=False, logits_processor=tape)
        assert played.tolist() == sampled.tolist()
        assert torch.equal(state, tape_state)


def test_multinomial_is_the_exponential_race_here() -> None:
    state = torch.get_rng_state()
    tape_matches_multinomial.cache_clear()
    assert tape_matches_multinomial(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state), "looking must not move the generator"


def test_another_multinomial_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tape_matches_multinomial.cache_clear()

    def by_inversion(p: torch.Tensor, n: int) -> torch.Tensor:
        return torch.cumsum(p, -1).gt(torch.rand(len(p), 1)).int().argmax(-1, True)

    monkeypatch.setattr(torch, "multinomial", by_inversion)
    assert not tape_matches_multinomial(torch.device("cpu"))
    tape_matches_multinomial.cache_clear()


def test_where_the_tape_does_not_match_sampling_falls_back_to_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec import generation

    monkeypatch.setattr(generation, "tape_matches_multinomial", lambda device: False)
    with pytest.warns(UserWarning, match="rejection"):
        output, _ = run(model_of("llama"), prompt(), max_new_tokens=6, do_sample=True, speculative_mode="prompt_lookup")
    assert output.shape[1] <= 18


def test_steps_are_drawn_in_order_and_only_once() -> None:
    tape = NoiseTape(0)
    tape.shape_from(torch.zeros(2, 30))
    torch.manual_seed(3)
    ahead = tape.noise(2).clone()
    torch.manual_seed(3)
    draws = [torch.empty(2, 30).exponential_(1) for _ in range(3)]
    assert torch.equal(ahead, draws[2])
    assert torch.equal(tape.noise(0), draws[0])
    assert torch.equal(tape.noise(1), draws[1])


def test_rewind_puts_the_generator_after_so_many_draws() -> None:
    torch.manual_seed(4)
    torch.empty(2, 30).exponential_(1)
    expected = torch.get_rng_state()
    torch.manual_seed(4)
    start = torch.get_rng_state()
    tape = NoiseTape(0)
    tape.shape_from(torch.zeros(2, 30))
    tape.noise(5)
    tape.rewind(1)
    assert torch.equal(torch.get_rng_state(), expected)
    tape.rewind(0)
    assert torch.equal(torch.get_rng_state(), start)


def test_released_noise_is_forgotten() -> None:
    tape = NoiseTape(0)
    tape.shape_from(torch.zeros(1, 8))
    tape.noise(4)
    tape.release(3)
    assert sorted(tape._noise) == [3, 4]


def test_a_subclass_is_not_on_the_allow_list() -> None:
    class Mine(host.TemperatureLogitsWarper):
        pass

    assert all_of(LogitsProcessorList([host.TemperatureLogitsWarper(0.5)]), sampling.ROW_WISE)
    assert not all_of(LogitsProcessorList([Mine(0.5)]), sampling.ROW_WISE)


def row_wise_examples() -> dict[str, object]:
    """One of each allow-listed processor; a processor without an example fails the test below."""
    eos = torch.tensor([2])
    speech = GenerationConfig.from_dict({"no_timestamps_token_id": 25, "eos_token_id": 20, "bos_token_id": 20})
    ignored = torch.tensor([0, 2, 5]) if CACHE_KEY == "cache" else 2  # newer versions take a length per row
    return {
        "TemperatureLogitsWarper": host.TemperatureLogitsWarper(0.7),
        "TopKLogitsWarper": host.TopKLogitsWarper(5),
        "TopPLogitsWarper": host.TopPLogitsWarper(0.8),
        "MinPLogitsWarper": host.MinPLogitsWarper(0.1),
        "TopHLogitsWarper": host.TopHLogitsWarper(0.5),
        "TypicalLogitsWarper": host.TypicalLogitsWarper(0.9),
        "EpsilonLogitsWarper": host.EpsilonLogitsWarper(0.01),
        "EtaLogitsWarper": host.EtaLogitsWarper(0.01),
        "LogitNormalization": host.LogitNormalization(),
        "SuppressTokensLogitsProcessor": host.SuppressTokensLogitsProcessor([3, 4]),
        "InfNanRemoveLogitsProcessor": host.InfNanRemoveLogitsProcessor(),
        "MinLengthLogitsProcessor": host.MinLengthLogitsProcessor(20, eos),
        "MinNewTokensLengthLogitsProcessor": host.MinNewTokensLengthLogitsProcessor(4, 8, eos),
        "RepetitionPenaltyLogitsProcessor": host.RepetitionPenaltyLogitsProcessor(1.3, ignored),
        "NoRepeatNGramLogitsProcessor": host.NoRepeatNGramLogitsProcessor(2),
        "NoBadWordsLogitsProcessor": host.NoBadWordsLogitsProcessor([[5], [7, 8]], eos_token_id=eos),
        "SequenceBiasLogitsProcessor": host.SequenceBiasLogitsProcessor([[[6], 2.0], [[7, 8], -3.0]]),
        "SuppressTokensAtBeginLogitsProcessor": host.SuppressTokensAtBeginLogitsProcessor([3], 12),
        "ForcedBOSTokenLogitsProcessor": host.ForcedBOSTokenLogitsProcessor(1),
        "ForcedEOSTokenLogitsProcessor": host.ForcedEOSTokenLogitsProcessor(13, eos),
        "ExponentialDecayLengthPenalty": host.ExponentialDecayLengthPenalty((2, 1.5), eos, 8),
        "WhisperTimeStampLogitsProcessor": host.WhisperTimeStampLogitsProcessor(speech, begin_index=2),
    }


@pytest.mark.parametrize("kind", sorted(kind.__name__ for kind in sampling.ROW_WISE))
def test_allow_listed_processors_treat_every_row_by_itself(kind: str) -> None:
    """Alone, in a batch, in any order and again: the same scores. That is what the allow-list promises."""
    example = row_wise_examples()[kind]
    ids, scores = torch.randint(3, 40, (3, 12)), torch.randn(3, 40)
    processors = Selection(LogitsProcessorList([example]), True, None)
    together = processors.process(ids, scores.clone(), None)
    for rows in ([2], [0, 1], [1, 2], [0]):
        alone = processors.process(ids[rows], scores[rows].clone(), rows)
        assert torch.equal(alone, together[rows])
    if type(example) in sampling.CONTEXT_FREE:
        other = copy.deepcopy(example)(torch.randint(3, 40, (3, 7)), scores.clone())
        assert torch.equal(other, together)
