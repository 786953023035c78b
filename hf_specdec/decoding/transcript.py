"""What has been committed, as plain `generate` would hold and return it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Outputs:
    """What `return_dict_in_generate` asks for, one entry per generated step."""

    # per step [B, V]
    scores: list[torch.Tensor] | None = None
    logits: list[torch.Tensor] | None = None
    # per step, per layer
    hidden_states: list[tuple[torch.Tensor, ...]] | None = None
    attentions: list[tuple[torch.Tensor, ...]] | None = None

    @classmethod
    def wanted(cls, generation_config: Any) -> Outputs:
        if not generation_config.return_dict_in_generate:
            return cls()
        return cls(
            scores=[] if generation_config.output_scores else None,
            logits=[] if generation_config.output_logits else None,
            hidden_states=[] if generation_config.output_hidden_states else None,
            attentions=[] if generation_config.output_attentions else None,
        )

    @property
    def any(self) -> bool:
        return any(entry is not None for entry in (self.scores, self.logits, self.hidden_states, self.attentions))


@dataclass
class Transcript:
    """The text of every row as plain `generate` would hold it, and who is done."""

    # [B, capacity]; the first `lengths[b]` columns are row b's, prompt and its padding included
    ids: torch.Tensor
    prompt_length: int
    lengths: list[int]
    finished: list[bool]

    @classmethod
    def of(cls, input_ids: torch.Tensor, capacity: int) -> Transcript:
        batch, prompt_length = input_ids.shape
        # int32 prompts come back as int64, as they do from plain generate
        ids = torch.zeros((batch, max(capacity, prompt_length)), dtype=torch.long, device=input_ids.device)
        ids[:, :prompt_length] = input_ids
        return cls(ids, prompt_length, [prompt_length] * batch, [False] * batch)

    def append(self, row: int, token: int) -> None:
        if self.lengths[row] == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)], dim=1)
        self.ids[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def view(self, rows: list[int] | None, length: int) -> torch.Tensor:
        """`[k, length]`, contiguous, as plain `generate` passes it to processors and criteria."""
        ids = self.ids[:, :length] if rows is None else self.ids[rows, :length]
        return ids.contiguous()

    @property
    def steps(self) -> int:
        """Steps that plain decoding would have taken: those of the longest row."""
        return max(self.lengths) - self.prompt_length
