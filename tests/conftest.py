"""What the tests share: prompts, noisy drafters, and the comparison with plain generate."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from peft import inject_adapter_in_model
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec.heads import MedusaConfig, find_heads
from hf_specdec.heads.medusa.learning import HeadsInTraining, Positions
from hf_specdec.host.modules import watching_hook
from hf_specdec.target.selftest import support
from hf_specdec.testing import ScriptedDrafter, tiny_model
from hf_specdec.training.data import DataSettings, answer, joined

torch.set_num_threads(1)  # tiny models: threads only get in one another's way


# kinds of models that take no token trees: ALiBi, and recurrent states
RECURRENT = ["qwen3_next", "qwen3_5_text", "nemotron_h", "falcon_h1", "olmo_hybrid"]
CHAINS_ONLY = ["falcon_alibi", *RECURRENT]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


_models: dict[tuple, Any] = {}


def model_of(name: str = "llama", **settings: Any) -> Any:
    """A tiny model, made once. Tests must leave it as it is (see `assert_unchanged`)."""
    key = (name, *sorted((k, str(v)) for k, v in settings.items()))
    if key not in _models:
        _models[key] = tiny_model(name, **settings)
    return _models[key]


def model_with_heads(name: str = "llama", head_type: str = "sequential", **settings: Any) -> Any:
    """A tiny model of its own with Medusa heads that were fitted to what it says to `prompt`. Made once."""
    key = ("heads", name, head_type, *sorted((k, str(v)) for k, v in settings.items()))
    if key not in _models:
        _models[key] = add_heads(tiny_model(name, **settings), head_type)
    return _models[key]


def add_heads(model: Any, head_type: str = "sequential", fitted: bool = True, **config: Any) -> Any:
    """Put an adapter of heads into a model: fitted to what it says to `prompt`, or random. Returns the model."""
    inject_adapter_in_model(MedusaConfig(head_type=head_type, **{"num_heads": 3, **config}), model)
    heads = find_heads(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in heads.heads.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    if fitted:
        texts = prompt(3, padding=3, repeat=True)
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(texts["input_ids"], texts["attention_mask"], strict=True)
        ]
        said = answer(model, prompts, DataSettings(max_new_tokens=40), do_sample=False, seed=0)
        positions = Positions(joined(said, prompts), heads.num_heads, torch.arange(heads.vocab_size))
        batch = positions.__getitems__(range(len(positions)))
        training = HeadsInTraining(heads)
        optimizer = torch.optim.Adam(training.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            training(**batch)["loss"].backward()
            optimizer.step()
    return model


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model that others may load."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def base(base_folder: Path) -> Any:
    """A base model of the test's own."""
    return AutoModelForCausalLM.from_pretrained(base_folder).eval()


def prompt(batch: int = 1, length: int = 12, padding: int = 0, repeat: bool = False, seed: int = 1) -> dict[str, Any]:
    """`input_ids` and `attention_mask` `[batch, length]`; row b is padded on the left by `b * padding`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    if repeat:
        ids[:, length // 2 :] = ids[:, : length - length // 2].clone()
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : row * padding] = 0
        ids[row, : row * padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, inputs: dict[str, Any], seed: int = 0, **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """(what generate returns, the generator's state after it), from a fixed seed."""
    torch.manual_seed(seed)
    output = model.generate(**inputs, **kwargs)
    return output, torch.get_rng_state()


def assert_same(model: Any, inputs: dict[str, Any], speculation: dict[str, Any], seed: int = 0, **kwargs: Any) -> Any:
    """Assert that speculation changes neither the tokens nor the generator's state; returns its statistics."""
    plain, plain_state = run(model, inputs, seed, **kwargs)
    with hf_specdec.record() as stats:
        ours, our_state = run(model, inputs, seed, **kwargs, **speculation)
    plain, ours = getattr(plain, "sequences", plain), getattr(ours, "sequences", ours)
    assert ours.tolist() == plain.tolist()
    assert torch.equal(our_state, plain_state)
    assert stats.calls == 1, "the call was not decoded speculatively"
    return stats


def texts_of(model: Any, inputs: dict[str, Any], seed: int = 0, **kwargs: Any) -> list[list[int]]:
    """Per row: prompt without padding, and what plain generate goes on with."""
    output, _ = run(model, inputs, seed, **kwargs)
    length = inputs["input_ids"].shape[1]
    return [
        [*ids[mask.bool()].tolist(), *row[length:].tolist()]
        for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"], output, strict=True)
    ]


def noisy_trees(texts: list[list[int]], vocab_size: int = 97, seed: int = 0, chains: bool = False) -> ScriptedDrafter:
    """Knows the texts but drafts trees full of wrong turns: rows accept different lengths on different branches."""
    rng = random.Random(seed)

    def script(row: int, text: list[int]) -> tuple[list[int], list[int]]:
        truth = texts[row][len(text) : len(text) + rng.randrange(0, 5)]
        tokens: list[int] = []
        parents: list[int] = []
        node = 0
        for token in truth:
            for _ in range(0 if chains else rng.randrange(0, 3)):  # wrong siblings before the right one
                tokens.append((token + rng.randrange(1, vocab_size)) % vocab_size)
                parents.append(node)
                if rng.random() < 0.3:  # and a wrong child below them
                    tokens.append(rng.randrange(vocab_size))
                    parents.append(len(tokens) - 1)
            tokens.append(token)
            parents.append(node)
            node = len(tokens)
        for _ in range(rng.randrange(0, 3)):  # a wrong end
            following = texts[row][len(text) + len(truth)] if len(text) + len(truth) < len(texts[row]) else 0
            tokens.append((following + 1) % vocab_size)
            parents.append(node)
            node = len(tokens)
        return tokens, parents

    return ScriptedDrafter(script)


def snapshot(model: Any) -> dict[str, Any]:
    """Everything about a model that a call must not change."""
    return {
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "training": model.training,
        "class": type(model),
        "attributes": sorted(vars(model)),
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def assert_unchanged(model: Any, before: dict[str, Any]) -> None:
    after = snapshot(model)
    weights, weights_before = after.pop("weights"), before["weights"]
    assert after == {key: value for key, value in before.items() if key != "weights"}
    assert weights.keys() == weights_before.keys()
    assert all(torch.equal(weights[name], weights_before[name]) for name in weights)


LOOKUP = {"speculative_mode": "prompt_lookup"}


def refused(error: type[Exception], match: str, model: Any = None, inputs: Any = None, **kwargs: Any) -> None:
    """Assert that the call raises this error without a forward and without a trace."""
    model = model_of("llama") if model is None else model
    support(model_of("llama"))  # the self-test is not what is counted here
    before = snapshot(model)
    ran = []
    handle = watching_hook(model, lambda *args: ran.append(1), before=True)
    try:
        with pytest.raises(error, match=match):
            run(model, prompt() if inputs is None else inputs, **{"max_new_tokens": 6, **LOOKUP, **kwargs})
    finally:
        handle.remove()
    assert not ran, "the model ran before the error"
    assert_unchanged(model, before)


def letter_tokenizer() -> Any:
    """A tokenizer of single characters, for vocabularies of 97."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(33, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
