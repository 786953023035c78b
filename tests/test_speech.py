"""A tiny random Whisper in the speech recognition pipeline, against plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

import hf_specdec
from hf_specdec.errors import UnsupportedGenerationError

SECONDS, RATE, MELS = 4, 16_000, 8  # a window of the encoder, samples a second, bins
_MARKS = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
ASKED = {"speculative_mode": "prompt_lookup", "speculative_config": {"num_draft_tokens": 4}}
SPEECH = {"language": "en", "task": "transcribe", "max_new_tokens": 40, "num_beams": 1}
FALLBACK = {"temperature": (0.0, 0.4, 0.8), "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35}


def tokenizer() -> Any:
    """A token per byte, Whisper's marks, and a timestamp for every 20 ms."""
    symbols = [*bytes_to_unicode().values(), _MARKS[0]]
    made = transformers.WhisperTokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    made.add_special_tokens({"additional_special_tokens": _MARKS[1:]})
    made.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(SECONDS * 50 + 1)])
    made.pad_token = _MARKS[0]
    return made


@pytest.fixture(scope="module")
def pipe() -> Any:
    words = tokenizer()
    mark = {name: words.convert_tokens_to_ids(name) for name in _MARKS}
    end = mark["<|endoftext|>"]
    tokens = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    tokens["decoder_start_token_id"] = mark["<|startoftranscript|>"]
    config = transformers.WhisperConfig(
        vocab_size=len(words),
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=SECONDS * 50,
        max_target_positions=100,
        num_mel_bins=MELS,
        begin_suppress_tokens=None,
        **tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
    model.generation_config = transformers.GenerationConfig.from_dict(
        {
            **tokens,
            "is_multilingual": True,
            "lang_to_id": {name: mark[name] for name in ("<|en|>", "<|de|>")},
            "task_to_id": {name: mark[f"<|{name}|>"] for name in ("translate", "transcribe")},
            "no_timestamps_token_id": mark["<|notimestamps|>"],
            "prev_sot_token_id": mark["<|startofprev|>"],
            "alignment_heads": [[0, 0], [1, 2]],
            "max_initial_timestamp_index": 50,
            "return_timestamps": False,
        }
    )
    features = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    return transformers.pipeline(
        "automatic-speech-recognition", model=model, tokenizer=words, feature_extractor=features
    )


def sound(seconds: float, seed: int = 0) -> Any:
    noise = torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(seed))
    return (0.1 * noise).numpy()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("seconds", "call", "decoding"),
    [
        pytest.param(3, {}, {}, id="short"),
        pytest.param(3, {}, {"language": None}, id="language-detected"),
        pytest.param(3, {}, {"do_sample": True, "temperature": 0.9}, id="sampled"),
        pytest.param(3, {"return_timestamps": True}, {}, id="timestamps"),
        pytest.param(3, {"return_timestamps": "word"}, {}, id="timestamps-of-words"),
        pytest.param(11, {"return_timestamps": True}, {}, id="long"),
        pytest.param(11, {"return_timestamps": True, "chunk_length_s": 3}, {}, id="long-in-pieces"),
        pytest.param(11, {"return_timestamps": True}, FALLBACK, id="long-with-fallback"),
        pytest.param(
            11,
            {"return_timestamps": True},
            {**FALLBACK, "condition_on_prev_tokens": True},
            id="long-with-what-was-said",
        ),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_same_transcript(pipe: Any, batch: int, seconds: float, call: Any, decoding: Any) -> None:
    def transcribe(**asked: Any) -> Any:
        torch.manual_seed(0)
        sounds = [sound(seconds, seed) for seed in range(batch)]
        return pipe(sounds, batch_size=batch, **call, generate_kwargs={**SPEECH, **decoding, **asked})

    plain = transcribe()
    with hf_specdec.record() as stats:
        assert transcribe(**ASKED) == plain
    assert stats.calls >= 1
    if not decoding.get("do_sample"):
        assert stats.total.accepted > 0


def test_a_draft_model_hears_the_same(pipe: Any) -> None:
    call = {"return_timestamps": True, "batch_size": 2}
    plain = pipe([sound(3), sound(3, 1)], **call, generate_kwargs=dict(SPEECH))
    # (Whisper's generate changes the generation config of a draft model)
    asked = {"speculative_mode": "assistant", "assistant_model": copy.deepcopy(pipe.model)}
    with hf_specdec.record() as stats:
        assert pipe([sound(3), sound(3, 1)], **call, generate_kwargs={**SPEECH, **asked}) == plain
    assert stats.acceptance_rate > 0.9


def test_beam_search_which_this_pipeline_uses_unless_told_otherwise_is_refused(pipe: Any) -> None:
    with pytest.raises(UnsupportedGenerationError, match=r"num_beams=5\. Set num_beams=1"):
        pipe(sound(1), generate_kwargs={"max_new_tokens": 40, **ASKED})
