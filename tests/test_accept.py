"""The acceptance rules. `rejection` is proved by enumeration: every coin and every draw is taken both ways, with its
probability, and the probabilities of all outcomes are added up."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import model_of, prompt, run
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec.acceptance import Choice, Offer
from hf_specdec.decoding.control import AdaptiveController, FixedController
from hf_specdec.decoding.cost import CostModel
from hf_specdec.decoding.experience import Experience
from hf_specdec.rules import draws
from hf_specdec.rules.coupled import Coupled
from hf_specdec.rules.rejection import Rejection
from hf_specdec.rules.typical import Typical
from hf_specdec.sampling import NoiseTape, Selection
from hf_specdec.testing import ScriptedDrafter

V = 4
P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.2, 0.25, 0.45, 0.1], dtype=torch.float64)


class Enumeration:
    """Runs a random procedure along every path of its random choices."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.taken: list[tuple[int, int]] = []
        self.weight = 1.0

    def choose(self, probabilities: list[float]) -> int:
        """One of several outcomes: the one this path takes."""
        options = [i for i, p in enumerate(probabilities) if p > 0.0]
        at = len(self.taken)
        index = self.script[at] if at < len(self.script) else 0
        self.taken.append((index, len(options)))
        self.weight *= probabilities[options[index]]
        return options[index]

    def coin(self, probability: float, device: Any = None) -> bool:
        return self.choose([1.0 - probability, probability]) == 1

    def draw(self, p: torch.Tensor) -> int:
        return self.choose(p.double().tolist())

    def outcomes(self, procedure: Callable[[], Any]) -> dict[Any, float]:
        """Probability of every result of `procedure`."""
        total: dict[Any, float] = defaultdict(float)
        self.script = []
        while True:
            self.taken, self.weight = [], 1.0
            result = procedure()
            total[result] += self.weight
            path = list(self.taken)
            while path and path[-1][0] + 1 == path[-1][1]:
                path.pop()
            if not path:
                return dict(total)
            self.script = [index for index, _ in path[:-1]] + [path[-1][0] + 1]


@pytest.fixture
def enumeration(monkeypatch: pytest.MonkeyPatch) -> Enumeration:
    enumeration = Enumeration()
    monkeypatch.setattr(draws, "coin", enumeration.coin)
    monkeypatch.setattr(draws, "token", enumeration.draw)
    return enumeration


def distribution(outcomes: dict[int, float]) -> list[float]:
    return [outcomes.get(token, 0.0) for token in range(V)]


def test_the_enumeration_itself() -> None:
    """Two dice of unequal sides: probabilities are products and add up to one."""
    enumeration = Enumeration()
    outcomes = enumeration.outcomes(lambda: (enumeration.choose([0.25, 0.75]), enumeration.coin(0.1)))
    assert outcomes == {
        (0, False): pytest.approx(0.225),
        (0, True): pytest.approx(0.025),
        (1, False): pytest.approx(0.675),
        (1, True): pytest.approx(0.075),
    }


Sample = Callable[[torch.Tensor, Offer], Choice]


def one_draft(enumeration: Enumeration, sample: Sample = Rejection.sample) -> list[float]:
    def procedure() -> int:
        token = enumeration.draw(Q)
        return sample(P, Offer([1], [token], [Q])).token

    return distribution(enumeration.outcomes(procedure))


def test_one_drafted_token_leaves_p(enumeration: Enumeration) -> None:
    assert one_draft(enumeration) == pytest.approx(P.tolist(), abs=1e-12)


def test_it_accepts_one_minus_the_total_variation(enumeration: Enumeration) -> None:
    def procedure() -> bool:
        token = enumeration.draw(Q)
        return Rejection.sample(P, Offer([1], [token], [Q])).node is not None

    total_variation = 0.5 * float((P - Q).abs().sum())
    assert enumeration.outcomes(procedure)[True] == pytest.approx(1 - total_variation, abs=1e-12)


@pytest.mark.parametrize("siblings", [2, 3])
def test_siblings_drawn_independently_leave_p(enumeration: Enumeration, siblings: int) -> None:
    qs = [Q, torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64), P.flip(0)][:siblings]

    def procedure() -> int:
        tokens = [enumeration.draw(q) for q in qs]
        return Rejection.sample(P, Offer(list(range(1, siblings + 1)), tokens, qs)).token

    assert distribution(enumeration.outcomes(procedure)) == pytest.approx(P.tolist(), abs=1e-12)


def test_siblings_drawn_without_replacement_leave_p(enumeration: Enumeration) -> None:
    def procedure() -> int:
        first = enumeration.draw(Q)
        rest = Q.clone()
        rest[first] = 0.0
        rest /= rest.sum()
        second = enumeration.draw(rest)
        return Rejection.sample(P, Offer([1, 2], [first, second], [Q, rest])).token

    assert distribution(enumeration.outcomes(procedure)) == pytest.approx(P.tolist(), abs=1e-12)


@pytest.mark.parametrize("tokens", [[2], [0, 3], [1, 2, 3], [0, 1, 2, 3]])
def test_deterministic_siblings_leave_p(enumeration: Enumeration, tokens: list[int]) -> None:
    nodes = list(range(1, len(tokens) + 1))
    outcomes = enumeration.outcomes(lambda: Rejection.sample(P, Offer(nodes, tokens)).token)
    assert distribution(outcomes) == pytest.approx(P.tolist(), abs=1e-12)


def test_a_vocabulary_of_the_draft_that_is_padded_differently(enumeration: Enumeration) -> None:
    for q in (Q[:3] / Q[:3].sum(), torch.cat([Q, torch.zeros(2, dtype=torch.float64)])):

        def procedure(q: torch.Tensor = q) -> int:
            return Rejection.sample(P, Offer([1], [enumeration.draw(q)], [q])).token

        assert distribution(enumeration.outcomes(procedure)) == pytest.approx(P.tolist(), abs=1e-12)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("siblings", [1, 2])
def test_sizing_a_drawn_draft_leaves_p(enumeration: Enumeration, fixed: bool, siblings: int) -> None:
    """A drawn token must not be left out for being improbable: what is verified would no longer be drawn from q."""

    def procedure() -> int:
        controller = FixedController(1) if fixed else AdaptiveController(Experience(CostModel("cpu")), 4)
        tokens = [enumeration.draw(P) for _ in range(siblings)]
        draft = hf_specdec.Draft(
            [[0, *tokens]],
            [[-1] + [0] * siblings],
            confidence=[[1.0, *(float(P[token]) for token in tokens)]],
            q=torch.stack([P] * (siblings + 1))[None],
        )
        sized = controller.size(draft, [True], most_nodes=8)
        nodes = sized.children[0][0]
        offer = Offer(nodes, [sized.tokens[0][node] for node in nodes], [sized.q[0, node] for node in nodes])
        return Rejection.sample(P, offer).token

    assert distribution(enumeration.outcomes(procedure)) == pytest.approx(P.tolist(), abs=1e-12)


class Wrong:
    """The mistakes that are easily made. Each must be told apart from the rule by the enumeration."""

    @staticmethod
    def always_accepts(p: torch.Tensor, offer: Offer) -> Choice:
        return Choice(offer.tokens[0], offer.nodes[0])

    @staticmethod
    def recovers_from_p(p: torch.Tensor, offer: Offer) -> Choice:
        token, q = offer.tokens[0], offer.q[0]
        if draws.coin(min(1.0, float(p[token] / q[token])), None):
            return Choice(token, offer.nodes[0])
        return Choice(draws.token(p), None)

    @staticmethod
    def recovers_without_norm_of_the_positive_part(p: torch.Tensor, offer: Offer) -> Choice:
        token, q = offer.tokens[0], offer.q[0]
        if draws.coin(min(1.0, float(p[token] / q[token])), None):
            return Choice(token, offer.nodes[0])
        residual = (p - q).abs()
        return Choice(draws.token(residual / residual.sum()), None)

    @staticmethod
    def takes_the_draft_for_a_point_mass(p: torch.Tensor, offer: Offer) -> Choice:
        return Rejection.sample(p, Offer(offer.nodes, offer.tokens, [torch.eye(V, dtype=p.dtype)[3]]))


@pytest.mark.parametrize("mistake", [name for name in vars(Wrong) if not name.startswith("_")])
def test_a_wrong_rule_is_found_out(enumeration: Enumeration, mistake: str) -> None:
    found = one_draft(enumeration, getattr(Wrong, mistake))
    assert sum(found) == pytest.approx(1.0, abs=1e-12)
    assert max(abs(a - b) for a, b in zip(found, P.tolist(), strict=True)) > 1e-3


# ---------------------------------------------------------------------- the whole loop, by enumeration


def joint(model: Any, inputs: dict[str, Any], steps: int) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation of `steps` tokens."""
    result = {}
    for tokens in itertools.product(range(V), repeat=steps):
        ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
        log_p = model(ids).logits[0].double().log_softmax(-1)
        start = inputs["input_ids"].shape[1] - 1
        result[tokens] = math.exp(sum(float(log_p[start + i, token]) for i, token in enumerate(tokens)))
    return result


@pytest.mark.parametrize("shape", ["chain", "tree", "deterministic"])
@torch.no_grad()
def test_the_loop_samples_the_joint_distribution(enumeration: Enumeration, shape: str) -> None:
    """Drafts of two levels, three tokens: all paths through drafting, accepting and recovering."""
    settings = {"pad_token_id": 0, "num_hidden_layers": 1, "initializer_range": 0.8}
    model = model_of("llama", vocab_size=V, dtype=torch.float64, **settings)
    inputs = {"input_ids": torch.tensor([[1, 3, 0]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    qs = [Q, P.flip(0)]

    class Drawing(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> hf_specdec.Draft:
            root = context.roots[0]
            if shape == "deterministic":
                return hf_specdec.Draft([[root, 2, 0, 1]], [[-1, 0, 0, 1]])
            if shape == "chain":
                tokens, parents, q = [root], [-1], [Q]
                for depth in range(budget.depth[0]):
                    tokens.append(enumeration.draw(qs[depth]))
                    parents.append(depth)
                    q.append(qs[depth])
            else:
                first, second = enumeration.draw(Q), enumeration.draw(qs[1])
                tokens, parents, q = [root, first, second], [-1, 0, 0], [Q, Q, qs[1]]
                if budget.depth[0] > 1:
                    tokens.append(enumeration.draw(Q))
                    parents.append(2)
                    q.append(Q)
            return hf_specdec.Draft([tokens], [parents], q=torch.stack(q)[None])

    drafter = Drawing(lambda row, text: [])

    def procedure() -> tuple[int, ...]:
        output, _ = run(
            model,
            inputs,
            max_new_tokens=3,
            min_new_tokens=3,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            speculative_mode=drafter,
            speculative_config={"acceptance": "rejection", "num_draft_tokens": 4},
        )
        return tuple(output[0, 3:].tolist())

    found, expected = enumeration.outcomes(procedure), joint(model, inputs, 3)
    assert sum(found.values()) == pytest.approx(1.0, abs=2e-6)
    for tokens, probability in expected.items():
        # the loop's scores are float32, as plain generate's are
        assert found.get(tokens, 0.0) == pytest.approx(probability, abs=2e-6)


# ---------------------------------------------------------------------- the other rules


def selection(do_sample: bool, tape: NoiseTape | None = None) -> Selection:
    return Selection(LogitsProcessorList(), do_sample, tape)


def test_coupled_takes_the_argmax_and_the_child_that_carries_it() -> None:
    rule = Coupled(selection(do_sample=False))
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0]])
    assert rule(scores, [Offer([1, 2], [3, 1]), Offer([1], [2])], 0, None) == [Choice(1, 2), Choice(0, None)]


def test_coupled_reads_the_row_and_step_of_the_tape() -> None:
    scores = torch.randn(2, 50)
    tape = NoiseTape(0)
    tape.shape_from(scores)
    rule = Coupled(selection(True, tape))
    for step, row in ((2, 1), (0, 0)):
        expected = int((scores[row].softmax(-1) / tape.noise(step)[row]).argmax())
        assert rule(scores[row : row + 1], [Offer([4], [expected])], step, [row]) == [Choice(expected, 4)]


def test_rejection_is_the_argmax_when_greedy() -> None:
    rule = Rejection(selection(do_sample=False))
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert rule(scores, [Offer([1], [1])], 0, None) == [Choice(1, 1)]
    assert rule(scores, [Offer([1], [3])], 0, None) == [Choice(1, None)]


def test_typical_threshold() -> None:
    """p = [.5 .3 .15 .05] has entropy 1.1421, so the threshold is min(0.09, 0.3 * exp(-1.1421)) = 0.09; and with
    epsilon 0.5 it is 0.3 * 0.31914 = 0.0957 (by hand)."""
    scores = P.log()[None].float()
    for epsilon, token, accepted in ((0.09, 2, True), (0.09, 3, False), (0.5, 2, True), (0.5, 3, False)):
        rule = Typical(selection(do_sample=False), epsilon=epsilon, delta=0.3)
        (choice,) = rule(scores, [Offer([7], [token])], 0, None)
        assert choice == (Choice(token, 7) if accepted else Choice(0, None))
    tight = Typical(selection(do_sample=False), epsilon=0.9, delta=0.5)  # threshold 0.5 * 0.319 = 0.1596 > 0.15
    assert tight(scores, [Offer([7], [2])], 0, None) == [Choice(0, None)]


def test_typical_prefers_the_likelier_child() -> None:
    rule = Typical(selection(do_sample=False))
    assert rule(P.log()[None].float(), [Offer([1, 2], [2, 1])], 0, None) == [Choice(1, 2)]


def test_typical_says_that_it_is_lossy() -> None:
    with pytest.warns(UserWarning, match="lossy"), hf_specdec.record() as stats:
        run(
            model_of("llama"),
            prompt(repeat=True),
            max_new_tokens=6,
            speculative_mode="prompt_lookup",
            speculative_config={"acceptance": "typical"},
        )
    assert stats.lossless is False
