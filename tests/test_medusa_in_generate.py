"""`medusa` inside `generate`: what the heads are given, what they cost, and where they are refused."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from conftest import add_heads, assert_same, assert_unchanged, model_with_heads, prompt, run, snapshot

import hf_specdec
from hf_specdec import MedusaDrafter
from hf_specdec.context import Context
from hf_specdec.draft import LAST_HIDDEN, Budget, Draft, HiddenRequest, Scores, Verdict
from hf_specdec.drafter import Drafter
from hf_specdec.errors import AdapterError, InvalidSettingError, UnsupportedModelError
from hf_specdec.heads import find_heads
from hf_specdec.host.modules import watching_hook
from hf_specdec.testing import tiny_model

HEAD_TYPES = ["independent", "sequential"]


@pytest.fixture(params=HEAD_TYPES)
def model(request: pytest.FixtureRequest) -> Any:
    return model_with_heads("llama", request.param)


def asked(**config: Any) -> dict[str, Any]:
    return {"speculative_mode": "medusa", "speculative_config": config}


# ---------------------------------------------------------------- inside generate


def test_heads_that_fit_are_accepted(model: Any) -> None:
    stats = assert_same(model, prompt(3, padding=3, repeat=True), asked(num_draft_tokens=6), max_new_tokens=30)
    assert stats.mean_acceptance_length > 1.3


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_untrained_heads_change_nothing(head_type: str, do_sample: bool, batch: int) -> None:
    from peft import get_peft_model

    from hf_specdec.heads import MedusaConfig

    peft_model = get_peft_model(tiny_model("llama"), MedusaConfig(head_type=head_type))
    assert_same(peft_model, prompt(batch, padding=2), asked(), max_new_tokens=20, do_sample=do_sample)
    assert_same(peft_model, prompt(batch, padding=2), asked(num_draft_tokens=8), max_new_tokens=20, do_sample=do_sample)


def test_no_forward_is_spent_on_drafts(model: Any) -> None:
    forwards = []
    hook = watching_hook(model.model, lambda *args: forwards.append(True))
    try:
        with hf_specdec.record() as stats:
            run(model, prompt(), max_new_tokens=20, eos_token_id=None, **asked(num_draft_tokens=6))
    finally:
        hook.remove()
    assert len(forwards) == stats.target_forwards < 20
    assert stats.total.drafted > 0


class Watching(Drafter):
    """Checks that the hidden states it is shown are those of the tokens: all of the prompts', and of what was kept."""

    LAYERS = (0, 1, 3, LAST_HIDDEN)
    hidden = HiddenRequest(LAYERS, prompt_positions=None)

    def __init__(self, inner: Drafter, model: Any) -> None:
        self.inner, self.model, self.seen = inner, model, 0

    def start(self, context: Context) -> None:
        self.texts = context.tokens
        self.inner.start(context)

    def attach(self, target: Any, prompt: Scores) -> None:
        for row, text in enumerate(self.texts):
            states = {layer: state[row, -len(text) :] for layer, state in prompt.hidden.items()}
            assert {len(state) for state in states.values()} == {len(text)}
            self.check(text, states)
        self.inner.attach(target, prompt)

    def propose(self, context: Context, budget: Budget) -> Draft:
        return self.inner.propose(context, budget)

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for place, row in enumerate(scores.rows):
            if verdict.committed[row]:
                states = {layer: state[place, verdict.kept[row]] for layer, state in scores.hidden.items()}
                self.check(context.tokens[row][:-1], states)
                self.seen += 1
        self.inner.observe(context, draft, scores, verdict)

    def check(self, text: list[int], states: dict[int, torch.Tensor]) -> None:
        assert states.keys() == set(self.LAYERS)
        with torch.no_grad():
            output = self.model.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
            expected = dict(enumerate(output.hidden_states)) | {LAST_HIDDEN: output.last_hidden_state}
        # transformers shows the last layer's state under the final norm
        states[3] = self.model.model.norm(states[3])
        for layer, state in states.items():
            torch.testing.assert_close(state, expected[layer][0, -len(state) :], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("streams", [False, True], ids=["own pace", "lockstep"])
def test_hidden_states_are_those_of_the_tokens(model: Any, streams: bool) -> None:
    """In batches whose rows accept different lengths, finish at different times, and are dropped."""
    inputs = prompt(3, padding=3, repeat=True)
    plain, _ = run(model, inputs, max_new_tokens=24)
    drafter = Watching(MedusaDrafter(find_heads(model)), model)
    eos = [int(plain[0, 12 + 6]), int(plain[1, 12 + 13])]
    extra: dict[str, Any] = {"return_dict_in_generate": True} if streams else {}
    config = {"num_draft_tokens": 6}
    output, _ = run(
        model, inputs, max_new_tokens=24, eos_token_id=eos, speculative_mode=drafter, speculative_config=config, **extra
    )
    expected, _ = run(model, inputs, max_new_tokens=24, eos_token_id=eos)
    assert getattr(output, "sequences", output).tolist() == expected.tolist()
    assert drafter.seen > 8


def test_nothing_stays_hooked_after_an_exception(model: Any) -> None:
    before = snapshot(model)

    class Broken(Exception):
        pass

    def fail(*args: Any) -> None:
        raise Broken

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(Broken):
        run(model, prompt(), max_new_tokens=8, **asked(num_draft_tokens=4))
    hook.remove()
    assert_unchanged(model, before)
    assert_same(model, prompt(), asked(num_draft_tokens=4), max_new_tokens=8)


def test_two_threads_with_one_model(model: Any) -> None:
    expected = [run(model, prompt(seed=seed), max_new_tokens=24)[0].tolist() for seed in (1, 2, 3)]
    found: dict[int, Any] = {}

    def generate(place: int) -> None:
        output = model.generate(**prompt(seed=place + 1), max_new_tokens=24, **asked(num_draft_tokens=6))
        found[place] = output.tolist()

    threads = [Thread(target=generate, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(3)] == expected


def test_a_model_that_does_not_call_its_head_is_refused() -> None:
    """Some models compute their scores past the module; then nothing can be seen there, and nothing has been run."""
    from transformers import LlamaForCausalLM

    class Silent(LlamaForCausalLM):
        def get_output_embeddings(self) -> Any:
            return self._beside

    origin = tiny_model("llama")
    silent = Silent(origin.config).eval()
    silent._beside = torch.nn.Linear(32, 97, bias=False)
    silent.generation_config = origin.generation_config
    add_heads(silent, fitted=False)
    with pytest.raises(UnsupportedModelError, match="does not call its LM head"):
        run(silent, prompt(), max_new_tokens=4, **asked())
    config = {"on_unsupported": "plain"}
    with pytest.warns(UserWarning, match="Decoding plainly"):
        output, _ = run(silent, prompt(), max_new_tokens=4, **asked(**config))
    assert output.tolist() == run(silent, prompt(), max_new_tokens=4)[0].tolist()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tree": []}, "rank paths"),
        ({"tree": [[0], [0]]}, "rank paths"),
        ({"tree": [[0], [-1]]}, "rank paths"),
        ({"tree": [[]]}, "rank paths"),
        ({"tree": ["0"]}, "rank paths"),
        ({"tree": [[0, 1]]}, "path above"),
        ({"tree": [[0]], "num_draft_tokens": 3}, "num_draft_tokens"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "only 3 heads"),
        ({"max_children": 0}, "max_children"),
        ({"draft_sampling": "loud"}, "draft_sampling"),
    ],
)
def test_settings_are_checked(model: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        run(model, prompt(), max_new_tokens=4, **asked(**config))


def test_heads_that_do_not_exist(model: Any) -> None:
    with pytest.raises(AdapterError, match="no Medusa heads 'other', but 'default'"):
        run(model, prompt(), max_new_tokens=4, **asked(adapter="other"))


def test_a_model_that_was_resized_since() -> None:
    for config in ({"own_lm_head": True}, {"output_rank": 8}, {"draft_vocab_size": 90}):
        model = add_heads(tiny_model("llama"), "independent", fitted=False, **config)
        model.resize_token_embeddings(80)
        with pytest.raises(AdapterError, match="80 tokens"):
            run(model, {"input_ids": torch.tensor([[3, 4, 5]])}, max_new_tokens=4, **asked())
    grown = add_heads(tiny_model("llama"), fitted=False, draft_vocab_size=90)
    grown.resize_token_embeddings(120)
    assert_same(grown, prompt(2, padding=3), asked(num_draft_tokens=6), max_new_tokens=10)


def test_all_that_can_be_drafted_is_ruled_out() -> None:
    model = add_heads(tiny_model("llama"), fitted=False, draft_vocab_size=20)
    sampling = {"do_sample": True, "eta_cutoff": 0.01, "suppress_tokens": list(range(20))}
    assert_same(model, prompt(2, padding=4), asked(num_draft_tokens=4), max_new_tokens=12, **sampling)


def test_heads_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = add_heads(tiny_model("llama"), fitted=False, draft_vocab_size=30)
    assert_same(model, prompt(), asked(num_draft_tokens=4), max_new_tokens=8)
