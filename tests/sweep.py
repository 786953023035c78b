"""Every type of causal language model that transformers knows, built tiny, against plain `generate`.

`python tests/sweep.py` prints a line per type and the counts; with `--write` it puts them into docs/support.md as well.
A type is built from its config class with the settings below, as far as it has them, and with those of `OVERRIDES`.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdec.errors import UnsupportedError
from hf_specdec.target.selftest import support
from hf_specdec.testing import ScriptedDrafter

VOCABULARY = 99
# the settings of tiny models, under all the names that configs have for them
GENERIC: dict[str, Any] = {
    # sizes
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        (
            *("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "dim_model", "lru_width"),
            "attention_hidden_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
            "encoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(
        (
            *("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"),
            *("ffn_hidden_size", "intermediate_size_mlp"),
        ),
        40,
    ),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    "rotary_dim": 4,
    "attention_types": [[["global", "local"], 1]],
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    # mixtures of experts
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "zero_expert_num"), 1),
    "first_k_dense_replace": 1,
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    # recurrent states
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "num_mem_blocks"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_chunk_size", "mamba_d_head", "mamba_head_dim", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_conv", "linear_conv_kernel_dim", "conv_kernel", "state_size", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_expand", "expand", "linear_num_key_heads", "attn_layer_period"), 2),
    **dict.fromkeys(("chunk_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "mamba_d_ssm": 64,
    "attn_layer_offset": 1,
    "linear_num_value_heads": 4,
    "layers_block_type": ["mamba", "attention"],
    "hybrid_layer_ids": [1],
    "conv_L_cache": 3,
    "use_mamba_kernels": False,
    # windows
    **dict.fromkeys(("attention_window_size", "sliding_window"), 8),
    "is_decoder": True,
    "rope_scaling": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OMIT = object()  # a generic setting that a type does not take
# latent attention has a key head for every query head
_LATENT = {"num_key_value_heads": 4}
_INKLING = {
    "unpadded_vocab_size": VOCABULARY,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "n_mamba_heads": 8,
    "attention_hidden_size": 64,
    "head_dim": OMIT,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
            *("glm_moe_dsa", "minicpm3", "mistral4", "youtu"),
        ),
        _LATENT,
    ),
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 200},
    "blt_local_encoder": {"hidden_size_global": 32},
    "blt_local_decoder": {"hidden_size_global": 32},
    "bamba": {"attn_layer_indices": [1], **dict.fromkeys(("layers_block_type", "layer_types"), OMIT)},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4},
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **dict.fromkeys(("n_input_layers", "n_output_layers"), 1),
        "n_recurrent_layers": 2,
    },
    "dots3_note_text": {**_LATENT, "head_dim": 8, "per_layer_config": {}},
    "granitemoehybrid": {"attn_layer_indices": [1], "layer_types": ["mamba", "attention"]},
    "inkling2_loop_text": _INKLING,
    "inkling2_text": _INKLING,
    "kimi_linear": {**_LATENT, "linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "moe_intermediate_size": 16},
    "longcat_flash": {**_LATENT, "head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 1},
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 50,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 64},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16), "attn_layers": ["local", "lsh"]},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "sarvam_mla": _LATENT,
    "xlm": {"n_words": VOCABULARY, "emb_dim": 32},
    "xlstm": {"hidden_size": 128, "num_heads": 4, "num_blocks": 2},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8, "layer_types": ["hybrid", "hybrid"]},
}
# what stands in for parts that may be of any type
ANY_TYPE = {"text": "llama", "decoder": "llama", "vision": "siglip_vision_model", "audio": "mimi"}
# large weights make differences show; where they drown what was read, smaller ones
STD, SMALLER = 0.15, {"nemotron_h": 0.1}
NOT_BUILT = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "A draft model that reads the keys and values of its target"
    ),
    "dots3_note": "The settings of its layers cannot be made fewer; dots3_note_text is tried",
    "gemma3n": "Its vision tower needs the package timm; gemma3n_text is tried",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "AutoModelForCausalLM does not build it from its config"),
}
SECONDS = 120  # for one type
BEGIN, END = "<!-- types: begin -->", "<!-- types: end -->"


@dataclass
class Result:
    """What came of a type."""

    kind: str  # tree, chain, replay, refused, not built, plain fails, different, error, hung
    why: str = ""
    equal: int = 0
    different: list[str] = field(default_factory=list)


class _TimeIsUp(BaseException):
    pass


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def tiny_config(model_type: str) -> Any:
    """A config of this type for a model of a few thousand weights."""
    return _tiny(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))


def _tiny(kind: Any, overrides: dict[str, Any]) -> Any:
    known = {*inspect.signature(kind.__init__).parameters, "pad_token_id"}
    known |= {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    settings = {name: value for name, value in GENERIC.items() if name in known}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if name not in known or not hasattr(part, "__mro__") or name in overrides:
            continue
        if part.__name__ == "AutoConfig":
            part = CONFIG_MAPPING[next(kind for word, kind in ANY_TYPE.items() if word in name)]
        settings[name] = _tiny(part, OVERRIDES.get(part.model_type, {})).to_dict()
    if "layer_types" in known and "layer_types" not in overrides:
        kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or []))
        if kinds:
            settings["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
            settings["num_hidden_layers"] = len(settings["layer_types"])
    settings |= overrides
    return kind(**{name: value for name, value in settings.items() if value is not OMIT})


def tiny(model_type: str) -> Any:
    """A model of this type with random weights, large enough to matter."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if weights > 5e7:
        raise ValueError(f"{weights / 1e6:.0f} million weights")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=SMALLER.get(model_type, STD))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return model


def calls(model: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What is tried: a name, the inputs, and how the text is decoded."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (3, 12), generator=generator)
    ids[:, 6:] = ids[:, :6].clone()
    ids[1, :3] = ids[2, :5] = 0
    for rows in (1, 3):
        inputs = {"input_ids": ids[:rows], "attention_mask": (ids[:rows] != 0).long()}
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9}):
            name = f"{'sampled' if sampling['do_sample'] else 'greedy'}, batch {rows}"
            yield name, inputs, {"max_new_tokens": 14, "eos_token_id": None, **sampling}


def decoded(model: Any, inputs: dict[str, Any], decoding: dict[str, Any], **speculation: Any) -> list[list[int]]:
    torch.manual_seed(3)
    return model.generate(**inputs, **decoding, **speculation).tolist()


def half_right(texts: list[list[int]], inputs: dict[str, Any]) -> ScriptedDrafter:
    """Drafts four tokens, of which every third is wrong."""
    prompts = [mask.sum().item() for mask in inputs["attention_mask"]]
    rest = [row[inputs["input_ids"].shape[1] :] for row in texts]

    def script(row: int, text: list[int]) -> list[int]:
        at = len(text) - prompts[row]
        return [token if (at + i) % 3 else (token + 1) % 90 for i, token in enumerate(rest[row][at : at + 4])]

    return ScriptedDrafter(script)


@functools.cache
def draft_model() -> Any:
    return tiny("llama")


def examine(model_type: str) -> Result:
    """Build a type and try it."""
    if model_type in NOT_BUILT:
        return Result("not built", NOT_BUILT[model_type])
    try:
        model = tiny(model_type)
    except Exception as error:
        return Result("not built", f"{type(error).__name__}: {error}")
    result = Result("")
    for name, inputs, decoding in calls(model):
        try:
            plain = decoded(model, inputs, decoding)
        except Exception as error:
            return Result("plain fails", f"{name}: {type(error).__name__}: {error}")
        modes: dict[str, Any] = {"half right": half_right(plain, inputs)}
        modes |= {mode: mode for mode in ("prompt_lookup", "lookahead", "early_exit", "assistant")}
        for mode, asked in modes.items():
            speculation = {"speculative_mode": asked, "speculative_config": {"num_draft_tokens": 4}}
            if mode == "assistant":
                speculation["assistant_model"] = draft_model()
            try:
                ours = decoded(model, inputs, decoding, **speculation)
            except UnsupportedError as error:
                if not result.why:
                    result.why = str(error)
                continue
            except Exception as error:
                return Result("error", f"{mode}, {name}: {type(error).__name__}: {error}")
            if ours == plain:
                result.equal += 1
            else:
                result.different.append(f"{mode}, {name}")
    if result.different:
        return Result("different", "; ".join(result.different), result.equal, result.different)
    if not result.equal:
        return Result("refused", result.why)
    abilities = support(model)
    result.kind = "tree" if abilities.trees else "replay" if abilities.replays else "chain"
    return result


def in_time(model_type: str) -> Result:
    """Examine a type, but not for ever."""
    try:
        with limited(SECONDS):
            return examine(model_type)
    except _TimeIsUp:
        return Result("hung", f"more than {SECONDS} seconds")


def table(results: dict[str, Result]) -> str:
    """The results as Markdown."""
    headings = {
        "tree": "Trees of drafted tokens",
        "chain": "Chains of drafted tokens",
        "replay": "Chains, with a recurrent state that is put back after a rejected draft",
        "refused": "Refused",
        "not built": "Not tried: cannot be built tiny",
        "plain fails": "Not tried: plain `generate()` raises",
        "different": "**Different text**",
        "error": "**Raises something else**",
        "hung": "**Does not end**",
    }
    groups: dict[str, list[str]] = {}
    for model_type, result in sorted(results.items()):
        groups.setdefault(result.kind, []).append(model_type)
    lines = ["| what | types |", "|---|---|"]
    for kind, heading in headings.items():
        if kind in groups:
            lines.append(f"| {heading} | {len(groups[kind])}: {', '.join(groups[kind])} |")
    whys = {name: result.why for name, result in sorted(results.items()) if result.why}
    lines += ["", "Why some are refused, in whole or in part, or were not tried:", "", "| type | why |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {first_sentence(why)} |" for name, why in whys.items())])


def first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].rstrip(".").replace("|", "\\|")


def write(page: Path, results: dict[str, Result]) -> None:
    """Put the table between its marks in a page."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="put the table into docs/support.md")
    arguments = parser.parse_args()
    if arguments.write and arguments.types:
        parser.error("--write needs all types")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results: dict[str, Result] = {}
    for model_type in arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        result = results[model_type] = in_time(model_type)
        print(f"{model_type:28} {result.kind:12} {result.equal:3} {first_sentence(result.why)[:150]}", flush=True)
    counts = Counter(result.kind for result in results.values())
    print(f"{sum(result.equal > 0 and not result.different for result in results.values())} equal: {dict(counts)}")
    if arguments.write:
        write(Path(__file__).parents[1] / "docs" / "support.md", results)


if __name__ == "__main__":
    main()
