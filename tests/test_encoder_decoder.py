"""Encoder-decoder models against plain generate: T5, BART and Whisper, tiny and random."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same, model_of, prompt, refused, run

import hf_specdec
from hf_specdec.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.target.selftest import support
from hf_specdec.testing import ScriptedDrafter

_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 97,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
CONFIGS: dict[str, Any] = {
    "t5": lambda: transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=97, **_TOKENS
    ),
    "bart": lambda: transformers.BartConfig(**_SIZES, max_position_embeddings=128, forced_eos_token_id=None, **_TOKENS),
    "whisper": lambda: transformers.WhisperConfig(
        **_SIZES, max_source_positions=20, max_target_positions=64, num_mel_bins=8, **_TOKENS
    ),
}


def build(name: str) -> Any:
    config = CONFIGS[name]()
    kinds = {"whisper": transformers.AutoModelForSpeechSeq2Seq}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kinds.get(name, transformers.AutoModelForSeq2SeqLM).from_config(config)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    model.generation_config = transformers.GenerationConfig(**_TOKENS)
    return model.eval()


def source(model: Any, batch: int) -> dict[str, torch.Tensor]:
    """What the encoder reads: texts of different lengths, padded on the right, or sound."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    ids = torch.randint(5, 90, (batch, 12), generator=generator)
    if batch > 1:
        ids[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def whole_text(model: Any) -> dict[str, Any]:
    """What lets Whisper's own `generate` return what the decoder wrote, its first token included."""
    return {"force_unique_generate_call": True} if model.main_input_name == "input_features" else {}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_same_text(model: Any, mode: str, batch: int, do_sample: bool) -> None:
    asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
    sampling = {"temperature": 0.9, "repetition_penalty": 1.1} if do_sample else {}
    assert_same(model, source(model, batch), asked, max_new_tokens=24, do_sample=do_sample, **sampling)


@pytest.mark.parametrize("batch", [1, 3])
def test_right_drafts_save_forwards_and_wrong_ones_cost_none(model: Any, batch: int) -> None:
    inputs, decoding = source(model, batch), {"max_new_tokens": 21, "eos_token_id": None, **whole_text(model)}
    plain, _ = run(model, inputs, **decoding)
    texts = plain.tolist()
    assert plain.shape[1] == 22
    for drafter, rounds in (
        (ScriptedDrafter.knowing(texts, 4), 4),
        (ScriptedDrafter.lying(texts, 4, 97), 20),
    ):
        asked = {"speculative_mode": drafter, "speculative_config": {"num_draft_tokens": 4}}
        with hf_specdec.record() as stats:
            ours, _ = run(model, inputs, **decoding, **asked)
        assert ours.tolist() == texts
        assert stats.rounds == rounds


@pytest.mark.parametrize("mode", ["prompt_lookup", "lookahead"])
def test_rows_that_finish_leave_the_others_their_own_source(model: Any, mode: str) -> None:
    inputs = source(model, 3)
    plain, _ = run(model, inputs, max_new_tokens=24, eos_token_id=None, **whole_text(model))
    ends = [int(row[5 + 6 * index]) for index, row in enumerate(plain[:2])]
    asked = {"speculative_mode": mode, "speculative_config": {"num_draft_tokens": 4}}
    assert_same(model, inputs, asked, max_new_tokens=24, eos_token_id=ends)


def test_returned_dict_is_that_of_plain_generate(model: Any) -> None:
    inputs = source(model, 2)
    model.set_attn_implementation("eager")
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "max_new_tokens": 12,
        "eos_token_id": None,
        **whole_text(model),
    }
    plain, _ = run(model, inputs, **wanted)
    drafter = ScriptedDrafter.knowing(plain.sequences.tolist(), 3)
    with hf_specdec.record() as stats:  # (Whisper makes its output object anew)
        ours, _ = run(model, inputs, **wanted, speculative_mode=drafter, speculative_config={"num_draft_tokens": 3})
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert stats.acceptance_rate == 1.0
    torch.testing.assert_close(ours.scores, plain.scores, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.encoder_hidden_states, plain.encoder_hidden_states)
    for field in ("decoder_hidden_states", "decoder_attentions", "cross_attentions"):
        for mine, theirs in zip(getattr(ours, field), getattr(plain, field), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_positions_counted_by_the_cache_keep_rows_in_step() -> None:
    assert not support(build("bart")).movable
    assert support(build("t5")).movable
    assert support(build("whisper")).trees


# ---------------------------------------------------------------- draft models


def nearly(model: Any) -> Any:
    """A draft model that often agrees with this one."""
    copied = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for weight in copied.parameters():
            if weight.dim() > 1:
                weight.add_(0.01 * torch.randn_like(weight))
    return copied


def counted(module: Any) -> list[int]:
    """Its forwards from now on: the number of rows of each."""
    rows: list[int] = []
    module.register_forward_hook(lambda module, args, kwargs, output: rows.append(len(output[0])), with_kwargs=True)
    return rows


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_model_with_an_encoder_reads_the_source_once(model: Any, batch: int, do_sample: bool) -> None:
    draft, given = nearly(model), source(model, batch)
    support(draft)
    read = counted(draft.get_encoder())
    asked = {"speculative_mode": "assistant", "assistant_model": draft, "speculative_config": {"num_draft_tokens": 4}}
    decoding = {"max_new_tokens": 24, "do_sample": do_sample, **whole_text(model)}
    stats = assert_same(model, given, asked, **decoding)
    assert read == [batch]
    assert stats.rounds < 23
    assert stats.acceptance_rate > 0.2


def test_a_draft_model_is_given_a_source_for_every_text(model: Any) -> None:
    if model.main_input_name == "input_features":
        pytest.skip("Whisper's own generate returns one text")
    asked = {"speculative_mode": "assistant", "assistant_model": model, "speculative_config": {"num_draft_tokens": 4}}
    stats = assert_same(
        model, source(model, 2), asked, max_new_tokens=16, eos_token_id=None, do_sample=True, num_return_sequences=3
    )
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_model_without_an_encoder_shares_what_the_targets_made(batch: int) -> None:
    model = build("whisper")
    config = copy.deepcopy(model.config)
    config.encoder_layers = config.decoder_layers  # by which transformers counts the layers of its cache
    draft = transformers.WhisperForCausalLM(config).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    read = counted(model.get_encoder())
    given, asked = source(model, batch), {"speculative_mode": "assistant", "assistant_model": draft}
    asked["speculative_config"] = {"num_draft_tokens": 4}
    decoding = {"max_new_tokens": 21, "eos_token_id": None, **whole_text(model)}
    plain, _ = run(model, given, **decoding)
    del read[:]
    with hf_specdec.record() as stats:
        ours, _ = run(model, given, **decoding, **asked)
    assert ours.tolist() == plain.tolist()
    assert read[-1:] == [batch]
    assert len(read) <= 2  # (the self-test may be the other)
    assert stats.rounds == 4  # the decoder is the target's


@pytest.mark.parametrize(
    ("target", "draft", "match"),
    [
        ("t5", lambda: model_of("llama"), "takes no encoder_outputs"),
        ("llama", lambda: build("t5"), "the target has no encoder"),
        (
            "t5",
            lambda: transformers.WhisperForCausalLM(
                transformers.WhisperConfig(**{**_SIZES, "d_model": 16}, num_mel_bins=8, **_TOKENS)
            ),
            "reads hidden states of size 16, and those of the target's encoder have 32",
        ),
    ],
)
def test_draft_models_that_do_not_fit(target: str, draft: Any, match: str) -> None:
    model = build(target) if target in CONFIGS else model_of(target)
    given = source(model, 1) if target in CONFIGS else prompt()
    support(model)
    refused(UnsupportedModelError, match, model, given, speculative_mode="assistant", assistant_model=draft())


def test_a_draft_model_cannot_read_a_source_of_which_only_the_output_is_given() -> None:
    model = build("t5")
    states = model.get_encoder()(**source(model, 1), return_dict=True)
    support(model)
    inputs, asked = {"encoder_outputs": states}, {"speculative_mode": "assistant", "assistant_model": model}
    refused(UnsupportedGenerationError, "Pass the inputs of the encoder", model, inputs, **asked)
    plain = model.generate(encoder_outputs=states, max_new_tokens=8)
    with pytest.warns(UserWarning, match="Decoding plainly"):
        ours = model.generate(**inputs, **asked, max_new_tokens=8, speculative_config={"on_unsupported": "plain"})
    assert ours.equal(plain)
    assert model.generate(encoder_outputs=states, max_new_tokens=8, speculative_mode="lookahead").equal(plain)


@pytest.mark.parametrize("mode", ["early_exit", "medusa"])
def test_modes_of_decoder_only_models(mode: str) -> None:
    model = build("t5")
    support(model)
    refused(UnsupportedModelError, "is an encoder-decoder model", model, source(model, 1), speculative_mode=mode)
