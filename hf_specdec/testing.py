"""Tools for tests, ours and yours: a drafter that says what it is told, and tiny random models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .context import Context
from .draft import Budget, Draft, Scores, Verdict
from .drafter import Drafter

# A script answers: what should be drafted for this row, whose text so far is this? A chain of tokens, or a
# (tokens, parents) tree whose parents count the root as node 0.
Script = Callable[[int, list[int]], Sequence[int] | tuple[Sequence[int], Sequence[int]]]


class ScriptedDrafter(Drafter):
    """Drafts what `script(row, text)` says, right or wrong, and remembers what became of it.

    ```python
    drafter = ScriptedDrafter(lambda row, text: [7, 8, 9])
    model.generate(**inputs, speculative_mode=drafter, speculative_config={"num_draft_tokens": 3})
    ```
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.verdicts: list[Verdict] = []
        self.drafts: list[Draft] = []

    @classmethod
    def knowing(cls, texts: Sequence[Sequence[int]], length: int) -> ScriptedDrafter:
        """Always right: drafts the next `length` tokens of `texts[row]` (prompt without padding, and output)."""
        return cls(lambda row, text: list(texts[row][len(text) : len(text) + length]))

    @classmethod
    def lying(cls, texts: Sequence[Sequence[int]], length: int, vocab_size: int) -> ScriptedDrafter:
        """Always wrong: drafts tokens that `texts[row]` does not go on with."""

        def lie(row: int, text: list[int]) -> list[int]:
            truth = list(texts[row][len(text) : len(text) + length])
            truth += [0] * (length - len(truth))
            return [(token + 1) % vocab_size for token in truth]

        return cls(lie)

    def propose(self, context: Context, budget: Budget) -> Draft:
        tokens, parents = [], []
        for row, text in enumerate(context.tokens):
            depth = budget.depth[row]
            drafted = self.script(row, text) if depth > 0 else []
            if isinstance(drafted, tuple):
                tokens.append([text[-1], *drafted[0]])
                parents.append([-1, *drafted[1]])
            else:
                chain = list(drafted)[:depth]
                tokens.append([text[-1], *chain])
                parents.append(list(range(-1, len(chain))))
        return Draft(tokens=tokens, parents=parents)

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.drafts.append(draft)
        self.verdicts.append(verdict)


# the models of the conformance suite: name -> (config class of transformers, settings besides the common ones)
_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA_RULE: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": 8}),
    "gpt2": ("GPT2Config", {"n_head": 4, "n_positions": 256}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "falcon_alibi": (
        "FalconConfig",
        {"alibi": True, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": False},
    ),
    # with recurrent states
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_DELTA_RULE,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {
            **_DELTA_RULE,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 8,
            "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            # larger weights make its states grow what rounding leaves of one step and of a block to different tokens
            "initializer_range": 0.12,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "head_dim": 8,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA_RULE),
    # with an encoder
    "t5": (
        "T5Config",
        {"d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "tie_word_embeddings": False},
    ),
    "bart": (
        "BartConfig",
        {
            "encoder_layers": 2,
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
            "forced_eos_token_id": None,
        },
    ),
}
_WITH_ENCODER = ("t5", "bart")
# settings that a config has under a name of its own
_OWN_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {"num_hidden_layers": "n_layer", "hidden_size": "n_embd"},
    "t5": {"num_hidden_layers": "num_decoder_layers", "hidden_size": "d_model"},
    "bart": {"num_hidden_layers": "decoder_layers", "hidden_size": "d_model"},
}
# kinds of layers by their share, where a config says them in a list of its own
_LAYER_LISTS = ("layer_types", "layers_block_type")


def tiny_model_names(*, with_encoder: bool | None = None) -> list[str]:
    """Names that `tiny_model` knows: of all models, or only of those that have an encoder, or have none."""
    return [name for name in _MODELS if with_encoder in (None, name in _WITH_ENCODER)]


def tiny_model(name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A random model of a few thousand weights, in evaluation mode: vocabulary 97, BOS 1, EOS 2, padding 0.

    Args:
        name: one of `tiny_model_names()`.
        seed: seed of the weights; the global generator is left alone.
        dtype: of the weights.
        settings: of the config, besides or instead of the usual ones.
    """
    import transformers

    config_name, own = _MODELS[name]
    config_class = getattr(transformers, config_name)
    wanted = {**_COMMON, **own, **settings}
    for layers in _LAYER_LISTS:
        if layers in wanted:
            # (the last kinds, so that hybrids keep a layer with attention)
            wanted[layers] = wanted[layers][-wanted["num_hidden_layers"] :]
    for common, here in _OWN_NAMES.get(name, {}).items():
        wanted[here] = wanted.pop(common)
    config = config_class(**wanted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = transformers.AutoModelForSeq2SeqLM if name in _WITH_ENCODER else transformers.AutoModelForCausalLM
        model = kind.from_config(config, dtype=dtype)
        if name in _WITH_ENCODER:  # whose configs have other names for it, and less effect
            for weight in model.parameters():
                if weight.dim() > 1:
                    words = weight is model.get_input_embeddings().weight
                    torch.nn.init.normal_(weight, std=0.02 if words else 0.2)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    start = {"decoder_start_token_id": 3} if name in _WITH_ENCODER else {}
    model.generation_config = transformers.GenerationConfig(**tokens, **start)
    return model.eval()
