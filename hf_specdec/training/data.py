"""Self-distillation data: the base model answers prompts, and its hidden states are kept as they come by.

Answers are generated in batches by this package's own engine, which drops a row once it is finished and shows every
token's last hidden state to the drafter; `Recorder` is a drafter that drafts nothing and keeps them. So there is no
second pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ..context import Context
from ..draft import LAST_HIDDEN, Budget, Draft, HiddenRequest, Scores, Verdict
from ..drafter import Drafter
from ..errors import ConfigurationError
from ..heads.answers import PER_TOKEN, Answers
from ..heads.output import lm_head_shape
from ..target.cached_model import CachedModel


@dataclass(frozen=True)
class DataSettings:
    """How answers are made.

    Args:
        own_prompts: prompts that the base model is asked to make up itself, besides those given (Magpie,
            arXiv:2406.08464). Those that it does not finish are left out, and so is what it says twice.
        answers_per_prompt: the first is greedy, the others are sampled.
        max_new_tokens: most tokens of an answer, at least 3.
        max_prompt_tokens: longer prompts are left out.
        temperature: of the sampled answers.
        top_k_labels: K, tokens kept of the base model's distribution at every position.
        batch_size: prompts answered at once; one shard.
        seed: of the sampled answers.
    """

    own_prompts: int = 0
    answers_per_prompt: int = 2
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    temperature: float = 0.8
    top_k_labels: int = 8
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("answers_per_prompt", "max_prompt_tokens", "top_k_labels", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_new_tokens < 3:
            raise ConfigurationError(f"max_new_tokens must be at least 3, got {self.max_new_tokens}.")
        if self.own_prompts < 0:
            raise ConfigurationError(f"own_prompts must be at least 0, got {self.own_prompts}.")
        if not self.temperature > 0:
            raise ConfigurationError(f"temperature must be above 0, got {self.temperature}.")


# ---------------------------------------------------------------- answers


@dataclass
class Answer:
    """What the base model said to one prompt. T tokens; hidden state t gave token t."""

    # [T]
    tokens: torch.Tensor
    # [T, d]
    hidden: torch.Tensor
    # [T, K]: the likeliest tokens where each token was chosen, and their probabilities
    label_tokens: torch.Tensor
    label_probabilities: torch.Tensor


def joined(answers: Sequence[Answer], prompts: list[list[int]]) -> Answers:
    """These answers to these prompts, one after the other."""
    tensors: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in answers]) for name in PER_TOKEN}
    lengths = torch.tensor([len(one.tokens) for one in answers], dtype=torch.int32)
    return Answers(**tensors, lengths=lengths, prompts=prompts)


@dataclass
class _Row:
    hidden: list[torch.Tensor] = field(default_factory=list)
    label_tokens: list[torch.Tensor] = field(default_factory=list)
    label_probabilities: list[torch.Tensor] = field(default_factory=list)


class Recorder(Drafter):
    """Drafts nothing, and keeps what the target says at every token.

    Args:
        model: the target.
        top_k_labels: K, tokens kept of each of its distributions.
    """

    hidden = HiddenRequest(layers=(LAST_HIDDEN,))

    def __init__(self, model: Any, top_k_labels: int) -> None:
        self.model, self.top_k_labels = model, min(top_k_labels, lm_head_shape(model)[0])
        self._rows: list[_Row] = []
        self._texts: list[list[int]] = []
        self._prompt_lengths: list[int] = []

    def start(self, context: Context) -> None:
        self._rows = [_Row() for _ in context.tokens]
        self._texts, self._prompt_lengths = context.tokens, context.prompt_lengths

    @torch.no_grad()
    def attach(self, target: CachedModel, prompt: Scores) -> None:
        self._keep(range(len(self._rows)), prompt.hidden[LAST_HIDDEN][:, -1], prompt.logits[:, -1])

    def propose(self, context: Context, budget: Budget) -> Draft:
        self._texts = context.tokens
        return Draft.empty(context.roots)

    @torch.no_grad()
    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        hidden = scores.hidden[LAST_HIDDEN]
        index = [place for place, row in enumerate(scores.rows) if verdict.committed[row]]
        self._keep([scores.rows[place] for place in index], hidden[index, 0], scores.logits[index, 0])
        self._texts = context.tokens

    def _keep(self, rows: Sequence[int], hidden: torch.Tensor, logits: torch.Tensor) -> None:
        best = logits.float().softmax(-1).topk(self.top_k_labels)
        parts = (hidden.to(torch.bfloat16).cpu(), best.indices.int().cpu(), best.values.half().cpu())
        for row, state, tokens, probabilities in zip(rows, *parts, strict=True):
            self._rows[row].hidden.append(state)
            self._rows[row].label_tokens.append(tokens)
            self._rows[row].label_probabilities.append(probabilities)

    def answers(self) -> list[Answer]:
        """What was kept of the last call, per row. Of a call that ends with its first token nothing is."""
        width, labels = lm_head_shape(self.model)[1], self.top_k_labels
        found = []
        for row, text, length in zip(self._rows, self._texts, self._prompt_lengths, strict=True):
            count = min(len(row.hidden), len(text) - length)
            # (an empty list cannot be stacked)
            hidden = torch.stack([*row.hidden, torch.empty(width, dtype=torch.bfloat16)])
            tokens = torch.stack([*row.label_tokens, torch.empty(labels, dtype=torch.int32)])
            probabilities = torch.stack([*row.label_probabilities, torch.empty(labels, dtype=torch.half)])
            said = torch.tensor(text[length:], dtype=torch.int32)
            found.append(Answer(said[:count], hidden[:count], tokens[:count], probabilities[:count]))
        return found


def answer(
    model: Any, prompts: Sequence[Sequence[int]], settings: DataSettings, do_sample: bool, seed: int
) -> list[Answer]:
    """The model's answers to prompts (token ids), one batch."""
    recorder = Recorder(model, settings.top_k_labels)
    sampling = {"do_sample": True, "temperature": settings.temperature} if do_sample else {"do_sample": False}
    say(model, prompts, recorder, seed, max_new_tokens=settings.max_new_tokens, **sampling)
    return recorder.answers()


@torch.no_grad()
def say(model: Any, prompts: Sequence[Sequence[int]], drafter: Drafter, seed: int, **settings: Any) -> torch.Tensor:
    """What the model says to prompts (token ids), one batch padded on the left; a drafter looks on."""
    longest = max(map(len, prompts))
    own = model.generation_config
    pad = 0 if own.pad_token_id is None else own.pad_token_id
    ends = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id")}
    device = model.device
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
    # The model's distribution as it is. generate() would fill in what is left open from the model's own config
    # (penalties, top_k, banned words), so that one makes room for the call.
    model.generation_config = GenerationConfig(**ends, pad_token_id=pad, **settings)
    torch.manual_seed(seed)
    try:
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            speculative_mode=drafter,
            speculative_config={"num_draft_tokens": 1},
        )
    finally:
        model.generation_config = own
