"""What a drafter is: it proposes, the target decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from .context import Context
from .draft import Budget, Draft, HiddenRequest, Scores, Verdict
from .sampling import Selection
from .target.cached_model import CachedModel


class Drafter(CandidateGenerator, ABC):
    """Proposes token trees that the target verifies.

    A drafter can be wrong, it cannot be harmful: whatever it proposes, the target's own tokens are committed. So
    it holds no rule of acceptance.

    To write one, implement `propose`; `start` and `observe` are for drafters with a memory, `hidden` and `attach` for
    those that read or run the target itself. It is also a `CandidateGenerator` of transformers: `get_candidates` is its
    best chain, so transformers' own assisted decoding can drive it.
    """

    # the target's hidden states that it reads; may be set anew in `start`
    hidden: HiddenRequest = HiddenRequest()

    # whether part of its drafts costs next to nothing, so that it is asked for them when the rest does not pay
    drafts_for_free: bool = False

    # whether it can only draft for rows of a batch that have advanced equally, which makes them go in lockstep
    rows_in_step: bool = False

    # how many tokens `get_candidates` proposes
    num_candidate_tokens: int = 10
    _standalone: Context | None = None

    def start(self, context: Context) -> None:
        """A new call begins; `context` holds the prompts."""

    def attach(self, target: CachedModel, prompt: Scores) -> None:
        """The prompts are in the target's KV cache.

        Args:
            target: the target, for drafters that draft with a part of it.
            prompt: the forward over the prompts: logits `[B, 1, V]` at their ends, and the hidden states asked for,
                per layer `[B, P, d]` at the positions asked for, padding of shorter prompts on the left included.
        """

    @abstractmethod
    def propose(self, context: Context, budget: Budget) -> Draft:
        """A tree for every row, rooted in its last committed token, within the budget."""

    def observe(self, context: Context, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """What came of the last draft. `context` already holds the committed tokens."""

    # ------------------------------------------------------------------ transformers' CandidateGenerator

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        """`input_ids [1, T]` with the best drafted chain appended, `[1, T + k]`; no logits (a point mass)."""
        if input_ids.shape[0] != 1:
            raise ValueError("transformers' assisted decoding drafts for one row; use speculative_mode for batches")
        tokens = input_ids[0].tolist()
        context = self._standalone
        if context is None or context.tokens[0] != tokens[: len(context.tokens[0])]:
            selection = Selection(LogitsProcessorList(), do_sample=False, tape=None)
            context = Context(
                tokens=[tokens],
                prompt_lengths=[len(tokens)],
                finished=[False],
                device=input_ids.device,
                selection=selection,
                padded_prompts=input_ids,
            )
            self.start(context)
            self._standalone = context
        context.tokens[0] = tokens
        size = self.num_candidate_tokens
        draft = self.propose(
            context, Budget(depth=[size], room=[size], nodes=size, trees=False, pays=lambda chains: True)
        )
        chain = draft.best_chain().tokens[0][1 : size + 1]
        extra = torch.tensor([chain], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, extra], dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to do: the next `get_candidates` brings the tokens that were accepted."""
