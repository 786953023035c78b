"""`assistant`: a smaller model with the same tokenizer drafts a chain.

When the target samples, the draft model reads the target's own noise tape: `argmax(q / E_t)` is a sample of q and
agrees with the target's `argmax(p / E_t)` with probability at least (1 - TV) / (1 + TV) (arXiv:2408.07978). Its cache
is kept aligned with what was committed and is never filled twice. Drafting stops when its confidence, as the controller
has come to know it, no longer pays for another token.

References: arXiv:2211.17192, arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import SpeculativeConfig, check_range
from ..context import Context, DraftSampling, Source
from ..draft import Budget, Draft
from ..drafter import Drafter
from ..errors import (
    ConflictingArgumentsError,
    IncompatibleVocabularyError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from ..host.models import encode, encoded, execution_device, reads_source, source_width, text_config
from ..modes import Request
from ..target.cached_model import CachedModel
from ..target.extras import Extras
from ..target.selftest import support


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(SpeculativeConfig):
    """Settings of `assistant`.

    Args:
        draft_sampling: when the target samples, `"tape"` lets the draft model read the target's own noise, so that
            both pick the same token as often as can be (arXiv:2408.07978); `"greedy"` takes its argmax.
        max_vocabulary_padding: most entries by which the two vocabularies may differ and still be the same
            vocabulary padded to different sizes.
    """

    draft_sampling: DraftSampling = "tape"
    max_vocabulary_padding: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_vocabulary_padding", 0)


class AssistantDrafter(Drafter):
    """Drafts with a second causal language model.

    Args:
        assistant_model: the draft model; its vocabulary is the target's, possibly padded to another size.
        config: settings.
        vocab_size: size of the target's vocabulary; None takes the draft model's.
        encoder_width: hidden size of the target's encoder; None where it has none. A draft model that has an encoder
            reads the source with it, once a call; one that has none, as `WhisperForCausalLM`, is given the output of
            the target's.

    Raises:
        IncompatibleVocabularyError: the two vocabularies cannot be the same.
        UnsupportedModelError: only one of the two reads a source, or they do not fit.
        UnsupportedModelError: the draft model's cache cannot be rolled back.
    """

    def __init__(
        self,
        assistant_model: Any,
        config: AssistantConfig | None = None,
        vocab_size: int | None = None,
        encoder_width: int | None = None,
    ) -> None:
        _check_source(assistant_model, encoder_width)
        self.config = config or AssistantConfig()
        self.model = assistant_model
        own_size = text_config(assistant_model).vocab_size
        target_size = own_size if vocab_size is None else vocab_size
        if abs(own_size - target_size) > self.config.max_vocabulary_padding:
            raise IncompatibleVocabularyError(
                f"The draft model {type(assistant_model).__name__} has {own_size} tokens, the target {target_size}: "
                "they cannot share a tokenizer. Use a draft model of the same family (or raise max_vocabulary_padding "
                "if one is only padded further)."
            )
        self._own_size = own_size
        self._shared_size = min(own_size, target_size)
        self._support = support(assistant_model, with_source=encoder_width is not None)
        self.rows_in_step = not self._support.movable
        self._runner: CachedModel | None = None
        self._seen: list[list[int]] = []  # per row: the tokens in the draft model's cache

    def start(self, context: Context) -> None:
        if self.model.config.is_encoder_decoder and context.source is not None and not context.source.inputs:
            raise UnsupportedGenerationError(
                f"The draft model {type(self.model).__name__} has an encoder of its own, and this call gives only the "
                "output of the target's. Pass the inputs of the encoder."
            )
        self._runner = None
        self._seen = [[] for _ in context.tokens]

    @torch.no_grad()
    def propose(self, context: Context, budget: Budget) -> Draft:
        length = max((room for room, done in zip(budget.depth, context.finished, strict=True) if not done), default=0)
        length = min(length, budget.nodes)
        if length <= 0:
            return Draft.empty(context.roots)
        logits = self._catch_up(context)
        runner = self._runner
        assert runner is not None
        chains: list[list[int]] = [[] for _ in context.tokens]
        confidences: list[list[float]] = [[] for _ in context.tokens]
        q_columns: list[torch.Tensor] = []
        running = [row for row, done in enumerate(context.finished) if not done]
        idle = {row for row, done in enumerate(context.finished) if done}
        for depth in range(length):
            picks = context.pick(
                logits[:, : self._shared_size],
                range(context.batch_size),
                chains,
                sampling=self.config.draft_sampling,
                draws=True,
            )
            picked = picks.tokens[:, 0].tolist()
            for row, (token, confidence) in enumerate(zip(picked, picks.confidence[:, 0].tolist(), strict=True)):
                chains[row].append(token)
                confidences[row].append(confidence)
            if picks.q is not None:
                q_columns.append(picks.q)
            if depth + 1 == length or not budget.pays([confidences[row] for row in running]):
                break
            logits = runner.extend(picked, idle)
            for row, token in enumerate(picked):
                self._seen[row].append(token)
        return Draft.chains(
            context.roots,
            [chain[: max(room, 0)] for chain, room in zip(chains, budget.depth, strict=True)],
            [row[: max(room, 0)] for row, room in zip(confidences, budget.depth, strict=True)],
            # a column per drafted node, after one for the root
            q=torch.stack([q_columns[0], *q_columns], dim=1) if q_columns else None,
        )

    # ------------------------------------------------------------------ keeping the cache aligned

    def _catch_up(self, context: Context) -> torch.Tensor:
        """Bring the cache to the committed tokens; logits `[B, V]` after the last of them."""
        if self._runner is None:
            self._seen = [list(text) for text in context.tokens]
            texts = [self._readable(text) for text in self._seen]
            self._runner, logits = CachedModel.filled(self.model, self._support, texts, self._extras(context.source))
            return logits
        runner = self._runner
        idle = {row for row, done in enumerate(context.finished) if done}
        wrong, pending = [], []
        for row, text in enumerate(context.tokens):
            seen = self._seen[row]
            agreed = min(len(seen), len(text) - 1)
            while seen[:agreed] != text[:agreed]:
                agreed -= 1
            wrong.append(0 if row in idle else len(seen) - agreed)
            pending.append([text[-1]] if row in idle else text[agreed:])
            if row not in idle:
                self._seen[row] = list(text)
        if self.rows_in_step:
            self._align(wrong, pending, context.tokens, idle)
        if max(wrong):
            runner.take_back(wrong, idle)
        return runner.append([self._readable(row) for row in pending], idle)

    def _extras(self, source: Source | None) -> Extras | None:
        """What the draft model is given of the source."""
        if source is None:
            return None
        device, dtype = execution_device(self.model), self.model.dtype
        if not self.model.config.is_encoder_decoder:
            return Extras(encoded(source.states.to(device, dtype)))
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in source.inputs.items()
        }
        return Extras(encode(self.model, inputs))

    def _align(
        self, wrong: list[int], pending: list[list[int]], texts: Sequence[Sequence[int]], idle: Collection[int]
    ) -> None:
        """Let all rows take back and read equally many tokens, whatever finished ones read."""
        most, before = max(wrong), list(wrong)
        wrong[:] = [most] * len(wrong)
        for row, text in enumerate(texts):
            if row not in idle:
                pending[row] = list(text[len(text) - len(pending[row]) - (most - before[row]) :])
        (length,) = {len(tokens) for row, tokens in enumerate(pending) if row not in idle}
        for row in idle:
            pending[row] = [texts[row][-1]] * length

    def _readable(self, text: list[int]) -> list[int]:
        """The text, without the target's padding tokens that the draft model has no embedding for."""
        return [token if token < self._own_size else 0 for token in text]


def build(request: Request, config: Any) -> AssistantDrafter:
    """The drafter of mode `assistant`. Raises `ConflictingArgumentsError` without a draft model."""
    if request.assistant_model is None:
        raise ConflictingArgumentsError(
            "speculative_mode='assistant' needs assistant_model=, a smaller model with the same tokenizer."
        )
    width = source_width(request.model) if request.model.config.is_encoder_decoder else None
    return AssistantDrafter(request.assistant_model, config, text_config(request.model).vocab_size, width)


def _check_source(assistant_model: Any, encoder_width: int | None) -> None:
    """Raise `UnsupportedModelError` where only one of target and draft model reads a source, or they do not fit."""
    name, has_encoder = type(assistant_model).__name__, assistant_model.config.is_encoder_decoder
    if encoder_width is None and has_encoder:
        raise UnsupportedModelError(
            f"The draft model {name} is an encoder-decoder model, and the target has no encoder, so it would have "
            "nothing to read. Use a decoder-only draft model."
        )
    if encoder_width is None or has_encoder:
        return
    if not reads_source(assistant_model):
        raise UnsupportedModelError(
            f"The draft model {name} takes no encoder_outputs, so it would not know what the target reads. Use an "
            "encoder-decoder model, or one such as WhisperForCausalLM."
        )
    if source_width(assistant_model) != encoder_width:
        raise UnsupportedModelError(
            f"The draft model {name} reads hidden states of size {source_width(assistant_model)}, and those of the "
            f"target's encoder have {encoder_width}. Use a draft model that was made for this encoder."
        )
