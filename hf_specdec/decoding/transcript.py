"""What has been committed, as plain `generate` would hold and return it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepOutputs:
    """Per layer, what the model shows of one step (of the prompts' forward, all its positions)."""

    # [B, n, d]
    hidden_states: tuple[torch.Tensor, ...] | None = None
    # [B, heads, n, keys]
    attentions: tuple[torch.Tensor, ...] | None = None
    # [B, heads, n, keys of the encoder's output]
    cross_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class Outputs:
    """What `return_dict_in_generate` asks for, one entry per generated step."""

    # per step [B, V]
    scores: list[torch.Tensor] | None = None
    logits: list[torch.Tensor] | None = None
    # per step, per layer
    hidden_states: list[tuple[torch.Tensor, ...]] | None = None
    attentions: list[tuple[torch.Tensor, ...]] | None = None
    # (where there is an encoder; wanted with the others)
    cross_attentions: list[tuple[torch.Tensor, ...]] | None = None

    @classmethod
    def wanted(cls, generation_config: Any) -> Outputs:
        if not generation_config.return_dict_in_generate:
            return cls()
        return cls(
            scores=[] if generation_config.output_scores else None,
            logits=[] if generation_config.output_logits else None,
            hidden_states=[] if generation_config.output_hidden_states else None,
            attentions=[] if generation_config.output_attentions else None,
            cross_attentions=[] if generation_config.output_attentions else None,
        )

    @property
    def any(self) -> bool:
        """Whether anything is wanted."""
        return any(entry is not None for entry in (self.scores, self.logits, self.hidden_states, self.attentions))

    def record(self, scores: torch.Tensor, logits: torch.Tensor, step: StepOutputs) -> None:
        """Keep what is wanted of a step."""
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)
        for name in ("hidden_states", "attentions", "cross_attentions"):
            kept, shown = getattr(self, name), getattr(step, name)
            if kept is not None and shown is not None:
                kept.append(shown)

    def packed(self) -> dict[str, tuple | None]:
        """The entries as fields of the output object."""
        names = ("scores", "logits", "hidden_states", "attentions", "cross_attentions")
        return {name: None if getattr(self, name) is None else tuple(getattr(self, name)) for name in names}


# columns that are taken at first for tokens to come; more follow as they are needed
_FIRST_COLUMNS = 4096


@dataclass
class Transcript:
    """The text of every row as plain `generate` would hold it, and who is done. Only the walk writes it."""

    # [B, capacity]; the first `lengths[b]` columns are row b's, prompt and its padding included
    ids: torch.Tensor
    # per row: the prompt without its padding, then every committed token
    tokens: list[list[int]]
    prompt_length: int
    lengths: list[int]
    finished: list[bool]

    @classmethod
    def of(cls, input_ids: torch.Tensor, mask: torch.Tensor | None, max_length: int) -> Transcript:
        """Of prompts `[B, P]`, their mask, and the most columns that will be filled."""
        batch, prompt_length = input_ids.shape
        capacity = max(prompt_length, min(max_length, prompt_length + _FIRST_COLUMNS))
        # int32 prompts come back as int64, as they do from plain generate
        ids = torch.zeros((batch, capacity), dtype=torch.long, device=input_ids.device)
        ids[:, :prompt_length] = input_ids
        tokens = input_ids.tolist()
        if mask is not None and mask.shape == input_ids.shape:
            tokens = [
                [token for token, seen in zip(row, row_mask, strict=True) if seen]
                for row, row_mask in zip(tokens, mask.tolist(), strict=True)
            ]
        return cls(ids, tokens, prompt_length, [prompt_length] * batch, [False] * batch)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def append(self, row: int, token: int) -> None:
        """Commit a token."""
        if self.lengths[row] == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)], dim=1)
        self.ids[row, self.lengths[row]] = token
        self.lengths[row] += 1
        self.tokens[row].append(token)

    def view(self, rows: list[int] | None, length: int) -> torch.Tensor:
        """`[k, length]`, contiguous, as plain `generate` passes it to processors and criteria."""
        ids = self.ids[:, :length] if rows is None else self.ids[rows, :length]
        return ids.contiguous()

    def sequences(self, pad_token: int) -> torch.Tensor:
        """`[B, T]`, as plain `generate` returns it."""
        sequences = self.ids[:, : max(self.lengths)].clone()
        for row, length in enumerate(self.lengths):
            sequences[row, length:] = pad_token
        return sequences

    @property
    def steps(self) -> int:
        """Steps that plain decoding would have taken: those of the longest row."""
        return max(self.lengths) - self.prompt_length
