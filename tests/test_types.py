"""Types of causal language models, built tiny: what each takes part in, and equality with plain `generate`.

A few of them, with what is expected; `make sweep` tries them all.
"""

from __future__ import annotations

import pytest
import torch
from sweep import Result, in_time, table

TAKES = {
    "tree": ("deepseek_v3", "gemma2", "glm4_moe", "gpt_neox", "gpt_oss", "minicpm3", "qwen3_moe", "roberta", "xmod"),
    "chain": ("bloom", "llama4_text", "lfm2_moe", "mpt"),
    "replay": ("bamba", "granitemoehybrid", "kimi_linear", "mamba2", "zaya"),
}
REFUSED = {
    "doge": "choose the keys they attend to",
    "jamba": "keeps a recurrent state",
    "openai-gpt": "returns no cache",
    "prophetnet": "failed the self-test",
    "rwkv": "an object of its own instead of a transformers `Cache`",
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in TAKES.items() for name in names])
def test_equal_to_plain(kind, name):
    result = in_time(name)
    assert result.kind == kind, result
    assert result.equal >= 16


@pytest.mark.filterwarnings("ignore")
def test_gits_padding_is_refused_since_its_steps_do_not_see_it_as_drafts_would():
    result = in_time("git")
    assert result.kind == "tree"
    assert result.equal == 10  # all with a single prompt
    assert "reads the mask of padded prompts in another way" in result.why


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    result = in_time(name)
    assert result.kind == "refused", result
    assert REFUSED[name] in result.why


def test_a_table_of_results():
    results = {"b": Result("tree", equal=3), "a": Result("tree", equal=2), "c": Result("refused", "Too | old. Go on.")}
    assert table(results).splitlines() == [
        "| what | types |",
        "|---|---|",
        "| Trees of drafted tokens | 2: a, b |",
        "| Refused | 1: c |",
        "",
        "Why some are refused, in whole or in part, or were not tried:",
        "",
        "| type | why |",
        "|---|---|",
        "| c | Too \\| old |",
    ]
