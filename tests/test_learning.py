"""What heads learn: positions that line up with their targets, losses that are the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_exit import hidden_at_exit

from hf_specdec.errors import TrainingDataError
from hf_specdec.heads.answers import Answers
from hf_specdec.heads.losses import distillation_loss, feature_loss, head_weights
from hf_specdec.heads.medusa.learning import Positions
from hf_specdec.heads.trained_exit.learning import Texts, states_at_exit
from hf_specdec.testing import tiny_model
from hf_specdec.training.train import frequent_tokens


def _answers() -> Answers:
    """Two answers, of 4 tokens and of 2; everything says where it stands."""
    tokens = torch.tensor([10, 11, 12, 13, 20, 21], dtype=torch.int32)
    return Answers(
        tokens=tokens,
        hidden=tokens[:, None].bfloat16().expand(-1, 3),
        label_tokens=torch.stack([tokens, tokens + 50], dim=1),
        label_probabilities=torch.tensor([[0.75, 0.25]]).half().expand(6, -1),
        lengths=torch.tensor([4, 2], dtype=torch.int32),
        prompts=[[7, 8, 9], [6]],
    )


def test_positions_line_up() -> None:
    output_of = torch.full((97,), -1)
    output_of[[11, 12, 13, 21, 62]] = torch.arange(5)
    positions = Positions(_answers(), num_heads=2, output_of=output_of)
    assert len(positions) == 4  # the last token of an answer has nothing ahead
    batch = positions.__getitems__(range(4))
    assert batch["hidden"][:, 0].tolist() == [10, 11, 12, 20]
    assert batch["exists"].tolist() == [[True, True], [True, True], [True, False], [True, False]]
    seen = batch["exists"]
    assert batch["before"][:, 0].tolist() == [10, 11, 12, 20]  # what the last hidden state gave: the root of the draft
    assert batch["before"][:2, 1].tolist() == [11, 12]
    assert batch["target"][seen].tolist() == [0, 1, 1, 2, 2, 3]  # outputs of tokens 11 12, 12 13, 13, 21
    assert batch["features"][..., 0][seen].tolist() == [11, 12, 12, 13, 13, 21]
    assert batch["label_outputs"][0].tolist() == [[0, -1], [1, 4]]  # 11 and 61, 12 and 62
    assert positions[3]["hidden"].tolist() == [20, 20, 20]


def test_distillation_loss_is_the_cross_entropy_over_what_can_be_drafted() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]]).expand(3, -1)
    outputs = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    probabilities = torch.tensor([[0.6, 0.2], [0.3, 0.7], [0.5, 0.5]])
    log_q = logits[0].log_softmax(-1)
    expected = [-(0.75 * log_q[0] + 0.25 * log_q[1]), -log_q[2], torch.tensor(0.0)]
    torch.testing.assert_close(distillation_loss(logits, outputs, probabilities), torch.stack(expected))


def test_the_other_losses() -> None:
    state, hidden = torch.tensor([[0.0, 3.0]]), torch.tensor([[0.5, 0.0]])
    torch.testing.assert_close(feature_loss(state, hidden), torch.tensor([(0.5 * 0.25 + 2.5) / 2]))
    torch.testing.assert_close(head_weights(3, 0.5), torch.tensor([4.0, 2.0, 1.0]) / 7)


def test_frequent_tokens() -> None:
    answers = _answers()
    # every token counts once, and 0.75 as a label; 50 more counts 0.25
    assert frequent_tokens(answers, 6, 97).tolist() == [10, 11, 12, 13, 20, 21]
    assert frequent_tokens(answers, 8, 97).tolist() == [10, 11, 12, 13, 20, 21, 60, 61]


def test_split_keeps_prompts_together_and_loses_nothing() -> None:
    lengths = torch.randint(1, 5, (400,), generator=torch.Generator().manual_seed(0)).int()
    count = int(lengths.sum())
    each = torch.arange(count)
    prompts = [[number, 5] for number in range(200)] * 2
    answers = Answers(each, each[:, None], each[:, None], each[:, None], lengths, prompts)
    training, held_out = answers.split(0.2)
    assert sorted([*training.tokens.tolist(), *held_out.tokens.tolist()]) == list(range(count))
    assert not {tuple(prompt) for prompt in training.prompts} & {tuple(prompt) for prompt in held_out.prompts}
    assert 0.1 < len(held_out.lengths) / 400 < 0.3
    assert training.hidden[:, 0].tolist() == training.tokens.tolist()
    with pytest.raises(TrainingDataError, match="do not match"):
        Answers(each, each, each, each, lengths[:-1], prompts)


def test_states_at_an_exit_are_those_of_the_whole_text(tmp_path: Path) -> None:
    model, said = tiny_model("llama"), _answers()
    states = states_at_exit(model, said, 2, tmp_path / "states.safetensors", progress=False)
    for index, text in enumerate(([7, 8, 9, 10, 11, 12], [6, 20])):
        torch.testing.assert_close(states[index].float(), hidden_at_exit(model, text), rtol=0.02, atol=0.02)
    again = states_at_exit(None, said, 2, tmp_path / "states.safetensors", progress=False)
    assert [state.tolist() for state in again] == [state.tolist() for state in states]
    texts = Texts(said, states, torch.arange(97))
    batch = texts.__getitems__([0, 1])
    assert batch["mask"].sum(1).tolist() == [6, 2]
    # the first token of an answer follows the last of its prompt
    assert batch["exists"].tolist() == [
        [False, False, True, True, True, True],
        [True, True, False, False, False, False],
    ]
    assert batch["target"][batch["exists"]].tolist() == [10, 11, 12, 13, 20, 21]
    assert batch["features"][..., 0][batch["exists"]].tolist() == [10, 11, 12, 13, 20, 21]
