"""What a model can take part in, found out by trying: token trees, only chains, or nothing.

Some architectures accept a tree mask and silently ignore it; hooks may treat a step of one token differently from a
block. So the first use of a model compares the scores of a small tree, before and after a rollback, with those that the
same tokens get in steps of their own, as in plain decoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import UnsupportedCacheError, UnsupportedModelError
from ..host.generate import CACHE_KEY
from ..host.models import argument_names, execution_device, made_up_source, text_config
from ..memory import remembered, state_of
from ..sampling import forked_generators
from . import kv_cache as kv
from .cached_model import CachedModel
from .extras import Extras
from .forward import Forwards
from .halves import Halves
from .recurrent import has_states, shift_states
from .support import Support, check_structure, mask_kinds

# what a model may raise when a forward is not made for it
_FOREIGN = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError, AssertionError)
# added to recurrent states: some models leave them out where a forward has several tokens, and with small weights that
# hardly shows otherwise
_LARGE_STATE = 10.0


def support(model: Any, *, with_source: bool | None = None) -> Support:
    """What `model` supports, tested once per model and state (see `memory.state_of`).

    Args:
        model: the model.
        with_source: whether it reads an encoder's output; None where it has an encoder.

    Raises:
        UnsupportedModelError: not even a chain of drafted tokens can be verified and rolled back.
    """
    check_structure(model)
    reads = model.config.is_encoder_decoder if with_source is None else with_source

    def find() -> Support:
        with forked_generators(execution_device(model)):
            return _examine(model, reads)

    return remembered(model, "support", (reads, state_of(model)), find)


def check_padding(model: Any) -> None:
    """Raise `UnsupportedModelError` where a padded prompt's later steps do not see what drafted tokens would see.

    Some architectures shift the mask that plain decoding hands them. Tested once per model and state.
    """
    abilities = support(model)
    if abilities.movable:
        return  # rows of a batch had other gaps, and were scored rightly

    @torch.no_grad()
    def find() -> bool:
        with forked_generators(execution_device(model)):
            try:
                return _Reference(model, text_config(model), model.config.is_encoder_decoder).padding_agrees(abilities)
            except (*_FOREIGN, UnsupportedModelError):
                return False

    if not remembered(model, "padding", state_of(model), find):
        raise UnsupportedModelError(
            f"{type(model).__name__} reads the mask of padded prompts in another way in single steps than in a forward "
            "over drafted tokens. Pass prompts of one length, leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )


def halves_agree(model: Any, exit_layer: int) -> bool:
    """Whether the layers below an exit and those above it, run one after the other, are the model.

    Tested once per model, exit and state.
    """
    abilities = support(model)
    if not abilities.trees:
        return False  # masks for the upper half must be given

    @torch.no_grad()
    def find() -> bool:
        with forked_generators(execution_device(model)):
            try:
                return _Reference(model, text_config(model)).halves_agree(abilities, Halves(model, exit_layer))
            except (*_FOREIGN, UnsupportedModelError):
                return False

    return remembered(model, "halves", (exit_layer, state_of(model)), find)


@torch.no_grad()
def _examine(model: Any, with_source: bool) -> Support:
    config = text_config(model)
    masks, why = mask_kinds(config)
    try:
        reference = _Reference(model, config, with_source)
        cache = reference.prefill()
    except UnsupportedModelError:
        raise
    except _FOREIGN as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} failed the self-test with {type(error).__name__}: {error}. Leave out "
            "speculative_mode, or pass on_unsupported='plain'."
        ) from error
    if has_states(kv.of_text(cache)):
        return _examine_replay(model, reference)
    movable = kv.is_movable(cache)
    if masks and movable:
        trees = Support(trees=True, movable=True, masks=masks)
        try:
            agrees = reference.tree_agrees(trees)
        except _FOREIGN as error:
            agrees, why = False, f"a 4-D attention mask raised {type(error).__name__}"
        if agrees:
            return replace(trees, movable=reference.rows_agree(trees))
        why = why or "the self-test's tree scores differ from sequential scores"
    return _examine_chains(model, reference, movable, why or "its cache layers cannot be rearranged")


def _examine_replay(model: Any, reference: _Reference) -> Support:
    """What is left for a model with recurrent states: chains, whose tokens are read again after a rejection."""
    replay = Support(trees=False, movable=False, masks=(), why="a recurrent state reads one text", replays=True)
    try:
        agrees = reference.replay_agrees(replay)
    except _FOREIGN:
        agrees = False
    if not agrees:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps a recurrent state, and a forward over several tokens does not go on from "
            "it as single steps do, so drafts cannot be verified. Leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )
    return replay


def _examine_chains(model: Any, reference: _Reference, movable: bool, why: str) -> Support:
    """What is left for a model that takes no trees, and why it takes none."""
    chain = Support(trees=False, movable=movable, masks=(), why=why)
    try:
        agrees = reference.chain_agrees(chain)
    except _FOREIGN:
        agrees = False
    if not agrees:
        raise UnsupportedModelError(
            f"{type(model).__name__} failed the self-test: the scores of a drafted chain, verified in one forward, "
            "differ from the scores of the same tokens one by one. Leave out speculative_mode, or pass "
            "on_unsupported='plain'."
        )
    return replace(chain, movable=movable and reference.rows_agree(chain))


class _Reference:
    """Scores of two short continuations of one prompt, token by token, as plain decoding computes them."""

    # (tokens are chosen apart from one another and away from the special ids at the ends of most vocabularies)
    PROMPT, LONG, SHORT = 4, 4, 2  # prompt; root, a, b, c; root, d

    def __init__(self, model: Any, config: Any, with_source: bool = False) -> None:
        self.model, self.config, self.with_source = model, config, with_source
        self.names = argument_names(model)
        self._takes_positions = self.names.positions in inspect.signature(model.forward).parameters
        vocabulary = config.vocab_size
        ids = [(vocabulary // 3 + 7 * i) % vocabulary for i in range(self.PROMPT + self.LONG + 1)]
        self.prompt, (self.root, self.a, self.b, self.c, self.d) = ids[: self.PROMPT], ids[self.PROMPT :]
        rows = [[self.root, self.a, self.b, self.c], [self.root, self.d, self.b, self.c]]
        self.long, self.short = self._steps(rows)
        reduced = model.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(self.long.device.type)
        # Root mean square, relative to the spread of the scores. Rounding in bfloat16 comes to 0.07 on a real model, a
        # mask that is ignored to 0.96.
        self.tolerance = (0.25 if reduced else 1e-3) * float(self.long.std().clamp(min=1e-6))

    def _steps(self, rows: Sequence[Sequence[int]], state: float = 0.0) -> torch.Tensor:
        """`[B, n, V]`: the scores after each of these rows' tokens, in steps of one; `state` is added to states."""
        cache, scores = self._new_cache(), []
        kv.record_past(cache, False)
        self._forward([self.prompt] * len(rows), [0] * len(rows), cache)
        shift_states(cache, state)
        for position, column in enumerate(zip(*rows, strict=True), start=self.PROMPT):
            scores.append(self._forward([[token] for token in column], [position] * len(rows), cache)[:, -1])
        return torch.stack(scores, dim=1).float()

    def _forward(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], cache: Any, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores `[B, n, V]` of a forward over rows of tokens that begin at these positions."""
        model, device = self.model, execution_device(self.model)
        ids = torch.tensor([list(row) for row in rows], device=device)
        inputs: dict[str, Any] = {self.names.ids: ids, CACHE_KEY: cache, **self._extras(len(rows)).constant}
        if self._takes_positions:
            ahead = torch.arange(ids.shape[1], device=device)
            inputs[self.names.positions] = torch.tensor(list(starts), device=device)[:, None] + ahead
        if mask is not None:
            inputs[self.names.mask] = mask
        output = model(**inputs, use_cache=True)
        if output.get(CACHE_KEY) is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returns no cache, so drafts cannot be rolled back. Leave out "
                "speculative_mode, or pass on_unsupported='plain'."
            )
        return output.logits

    def prefill(self) -> Any:
        """A cache that holds the prompt. Raises `UnsupportedModelError` where it cannot be rolled back."""
        cache = self._new_cache()
        self._forward([self.prompt], [0], cache)
        kv.record_past(cache, True)
        try:
            kv.check_rollback(cache, type(self.model).__name__, total_slots=self.PROMPT + self.LONG)
        except UnsupportedCacheError as error:
            raise UnsupportedModelError(str(error)) from None
        return cache

    def _new_cache(self) -> Any:
        return kv.new_cache(self.config, with_source=self.with_source)

    def _extras(self, rows: int) -> Extras:
        return Extras(made_up_source(self.model, rows) if self.with_source else {})

    def _runner(self, support: Support) -> Any:
        positions = [self.PROMPT]
        return CachedModel(self.model, support, self.prefill(), None, positions, extras=self._extras(1))

    def rows_agree(self, support: Support) -> bool:
        """Whether rows of a batch may advance by different lengths: one keeps root and a, the other only the root."""
        try:
            runner, _ = CachedModel.filled(self.model, support, [self.prompt, self.prompt], self._extras(2))
            first = runner.forward([[self.root, self.a, self.d]] * 2, [[-1, 0, 1]] * 2).logits
            runner.commit([[0, 1], [0]])
            after = runner.forward([[self.b], [self.a]], [[-1]] * 2).logits
        except _FOREIGN:
            return False
        return (
            self._agree(first[0, :2], self.long[:2])
            and self._agree(after[0], self.long[2:3])
            and self._agree(after[1], self.long[1:2])
        )

    def padding_agrees(self, support: Support) -> bool:
        """Whether a padded row's tokens score as in plain decoding's steps, which are given the padding as 0 and 1."""
        texts, tokens = [self.prompt, self.prompt[-1:]], [self.root, self.a]
        runner, _ = CachedModel.filled(self.model, support, texts, self._extras(2))
        blocks = [runner.forward([tokens] * 2, [[-1, 0]] * 2).logits]
        if support.trees:  # which have a mask of another form
            runner, _ = CachedModel.filled(self.model, support, texts, self._extras(2))
            blocks.append(runner.forward([[self.root, self.a, self.d]] * 2, [[-1, 0, 0]] * 2).logits)
        _, cache, valid = Forwards(self.model).texts(texts, self._extras(2))
        assert valid is not None
        for step, token in enumerate(tokens):
            valid = torch.cat([valid, valid.new_ones(2, 1)], dim=1)
            scores = self._forward([[token]] * 2, [len(text) + step for text in texts], cache, valid.long())
            expected = scores[:, -1].float()
            if not all(self._agree(block[:, step], expected) for block in blocks):
                return False
        return True

    def _agree(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        differences = (logits.float() - expected).square().mean(-1).sqrt()  # [n]
        return bool((differences <= self.tolerance).all())  # NaN is not below anything

    def tree_agrees(self, support: Support) -> bool:
        runner = self._runner(support)
        # root -> d, root -> a -> b: then keep root, a, b and go on with c
        output = runner.forward([[self.root, self.d, self.a, self.b]], [[-1, 0, 0, 2]])
        first = output.logits[0]
        runner.commit([[0, 2, 3]])
        after = runner.forward([[self.c]], [[-1]]).logits[0]
        return (
            self._agree(first[[0, 2, 3]], self.long[:3])
            and self._agree(first[1], self.short[1])
            and self._agree(after[0], self.long[3])
        )

    def halves_agree(self, support: Support, halves: Halves) -> bool:
        """As `tree_agrees`; some run through the layers below the exit before it is known what is verified."""
        runner = self._runner(support)
        runner.forward_below(halves, [[self.root]], [[-1]])
        if runner.has_windows:  # drafts are chains there
            runner.forward_below(halves, [[self.a]], [[0]])
            first = runner.forward([[self.root, self.a, self.b]], [[-1, 0, 1]]).logits[0]
            runner.commit([[0, 1]])
            after = runner.forward([[self.b, self.c]], [[-1, 0]]).logits[0]
            return self._agree(first, self.long[:3]) and self._agree(after, self.long[2:])
        runner.forward_below(halves, [[self.d, self.a]], [[0, 0]])
        first = runner.forward([[self.root, self.a, self.b, self.d]], [[-1, 0, 1, 0]]).logits[0]
        runner.commit([[0, 1, 2]])
        after = runner.forward([[self.c]], [[-1]]).logits[0]
        return (
            self._agree(first[:3], self.long[:3])
            and self._agree(first[3], self.short[1])
            and self._agree(after[0], self.long[3])
        )

    def replay_agrees(self, support: Support) -> bool:
        runner = self._runner(support)
        # root -> a -> d: keep root, a; b -> d: keep b, having read root and a again; then c, after all three
        first = runner.forward([[self.root, self.a, self.d]], [[-1, 0, 1]]).logits[0]
        runner.commit([[0, 1]])
        second = runner.forward([[self.b, self.d]], [[-1, 0]]).logits[0]
        runner.commit([[0]])
        third = runner.forward([[self.c]], [[-1]]).logits[0]
        runner.commit([[0]])
        return (
            self._agree(first[:2], self.long[:2])
            and self._agree(second[:1], self.long[2:3])
            and self._agree(third, self.long[3:4])
            and self._block_reads_states(support)
        )

    def _block_reads_states(self, support: Support) -> bool:
        """Whether a block goes on from states that are too large to be overlooked."""
        runner = self._runner(support)
        shift_states(runner.cache, _LARGE_STATE)
        block = runner.forward([[self.root, self.a]], [[-1, 0]]).logits[0]
        return self._agree(block, self._steps([[self.root, self.a]], _LARGE_STATE)[0])

    def chain_agrees(self, support: Support) -> bool:
        runner = self._runner(support)
        # root -> a -> d: keep root, a and go on with b -> c
        first = runner.forward([[self.root, self.a, self.d]], [[-1, 0, 1]]).logits[0]
        runner.commit([[0, 1]])
        after = runner.forward([[self.b, self.c]], [[-1, 0]]).logits[0]
        return self._agree(first[:2], self.long[:2]) and self._agree(after, self.long[2:4])
