"""Every type of causal language model that transformers knows, built tiny, against plain `generate`.

`python tests/sweep.py` prints a line per type and the counts. A type is built from its config class with the settings
below, as far as it has them, and with those of `OVERRIDES`.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
# latent attention has a key head for every query head
_LATENT = {"num_key_value_heads": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text"),
            *("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "youtu"),
        ),
        _LATENT,
    ),
    **{
        key: {"attn_layer_indices": [1], "layer_types": ["mamba", "attention"]} for key in ("bamba", "granitemoehybrid")
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 1},
}
SECONDS = 120  # for one type


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
        if name in known and hasattr(part, "__mro__"):
            settings[name] = _tiny(part, {}).to_dict()
    if "layer_types" in known and "layer_types" not in overrides:
        kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or []))
        if kinds:
            settings["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
            settings["num_hidden_layers"] = len(settings["layer_types"])
    return kind(**{**settings, **overrides})


def tiny(model_type: str) -> Any:
    """A model of this type with random weights, large enough to matter."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if weights > 8e6:
        raise ValueError(f"{weights / 1e6:.0f} million weights")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
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


def examine(model_type: str) -> Result:
    """Build a type and try it."""
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
        modes |= {mode: mode for mode in ("prompt_lookup", "lookahead", "early_exit")}
        for mode, asked in modes.items():
            try:
                ours = decoded(
                    model, inputs, decoding, speculative_mode=asked, speculative_config={"num_draft_tokens": 4}
                )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for model_type in arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            with limited(SECONDS):
                result = examine(model_type)
        except _TimeIsUp:
            result = Result("hung", f"more than {SECONDS} seconds")
        counts[result.kind] += 1
        print(f"{model_type:28} {result.kind:12} {result.equal:3} {result.why[:150]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
