"""A model with its KV cache: score a block of token trees, keep each row's accepted path, drop the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from .. import tree
from ..errors import UnsupportedModelError
from ..host.generate import CACHE_KEY
from ..host.models import argument_names, attention_of, execution_device, text_config
from . import kv_cache as kv
from . import masks
from .extras import Extras
from .forward import Forwards, Output
from .halves import Halves
from .recurrent import SavedStates
from .replay import Replay
from .slots import Move, Slots
from .split_round import SplitRound
from .support import DENSE_MASKS, MaskKind, Support

Trees = Sequence[Sequence[int]]


class CachedModel:
    """A causal language model whose cache holds the committed tokens of every row, save the last.

    Args:
        model: the model.
        support: what it can take part in.
        cache: its cache, holding the prompt, recording its past.
        padding: `[B, slots]`, True where a slot holds a token; None where all do.
        next_position: per row, the position of the next token.
        forwards: what runs its forwards; None makes it.
        offsets: `[D, B]`, of the model's positions of several dimensions (M-RoPE) from those; None where there is one.
        extras: what every forward is given besides; None for nothing.
    """

    def __init__(
        self,
        model: Any,
        support: Support,
        cache: Any,
        padding: torch.Tensor | None,
        next_position: Sequence[int],
        forwards: Forwards | None = None,
        offsets: torch.Tensor | None = None,
        extras: Extras | None = None,
    ) -> None:
        self.model, self.support, self.cache = model, support, cache
        self.names, self.extras = argument_names(model), extras or Extras()
        self.forwards = forwards or Forwards(model)
        self.capacity = kv.capacity(cache)
        # some models leave their window to the cache, which shows a block more than each of its tokens may see
        self.has_windows = kv.has_windows(cache)
        self.slots = Slots(
            kv.slots(cache) if padding is None else padding.shape[1],
            next_position,
            padding,
            # holes need masks made from what slots hold; windows and static caches have no slots to spare for them
            holes=support.trees and not self.has_windows and self.capacity is None,
            fixed=self.capacity is not None,
            device=execution_device(model),
        )
        self._offsets = offsets
        self._width = 0  # nodes per row of the last forward, until they are committed
        self._split: SplitRound | None = None
        # where the cache has states that cannot be rolled back: their copy, and what must be read again
        self._states = SavedStates(kv.of_text(cache)) if support.replays else None
        self._replay = Replay(self.batch_size)

    @classmethod
    def filled(
        cls, model: Any, support: Support, texts: Trees, extras: Extras | None = None
    ) -> tuple[CachedModel, torch.Tensor]:
        """A model whose new cache holds these texts, padded on the left, and the logits `[B, V]` after each."""
        forwards = Forwards(model)
        logits, cache, valid = forwards.texts(texts, extras)
        runner = cls(model, support, cache, valid, [len(text) for text in texts], forwards, extras=extras)
        return runner, logits

    @classmethod
    def after_prompts(
        cls,
        model: Any,
        support: Support,
        cache: Any,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        forwards: Forwards,
        extras: Extras,
        batch: int,
    ) -> CachedModel:
        """A model that has read the prompts of a call.

        Args:
            model, support, cache, forwards, extras: as above.
            mask: `[B, P]`, 1 where the prompts have tokens; None where everywhere.
            positions: `[B, 1]` or `[D, B, 1]`, of the tokens after the prompts; None where the model is given none.
            batch: B.

        Raises:
            UnsupportedModelError: the cache holds more than the mask tells of.
        """
        slots, offsets = kv.slots(cache), None
        if mask is not None and mask.shape[1] < slots:
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps {slots} tokens of prompts with an attention_mask for {mask.shape[1]}: "
                "what drafted tokens may see cannot be told. Leave out the mask where nothing is padded, or "
                "speculative_mode."
            )
        if positions is not None and positions.dim() == 3:
            offsets = (positions - positions[:1])[:, :, 0].expand(-1, batch)
            positions = positions[0]
        if positions is not None:
            following = positions[:, 0].expand(batch).tolist()
        else:
            following = [slots] * batch if mask is None else mask.sum(-1).tolist()
        padding = None if mask is None else mask.bool()
        return cls(model, support, cache, padding, following, forwards, offsets, extras)

    @property
    def rows(self) -> list[int]:
        """Which rows of the batch it carries, in order."""
        return self.slots.rows

    @property
    def batch_size(self) -> int:
        """Rows that it carries."""
        return self.slots.batch_size

    @property
    def replayed(self) -> int:
        """Committed tokens per row that the next forward reads again, in front of its own."""
        return len(self._replay)

    @property
    def past_slots(self) -> int:
        """Slots that lie before the root's of the next forward."""
        return self.slots.count + self.replayed

    @property
    def root_positions(self) -> list[int]:
        """Per row, the position of the root of the next forward."""
        return [position + self.replayed for position in self.slots.next_position]

    # ------------------------------------------------------------------ scoring

    def forward(self, tokens: Trees, parents: Trees, layers: Sequence[int] = (), **wanted: Any) -> Output:
        """Score a tree per row in one forward. Rows with fewer nodes are padded at the end.

        Where nodes have run through the layers below an exit (`forward_below`), only the layers above it run, unless
        more is asked for than what these give.

        Args:
            tokens, parents: of the trees.
            layers: whose hidden states are wanted, as `HiddenRequest` counts them.
            wanted: what else the model's output should hold, as arguments of its forward.
        """
        if self._split is not None:
            if not wanted and self._can_go_on(self._split, tokens, parents, layers):
                return self._go_on(self._split, tokens, parents, layers)
            self.drop_lower_half()
        if self._states is not None:
            may_be_undone = max(map(len, tokens)) > 1
            return self._read(self._states, tokens, may_be_undone, layers, **wanted)
        output = self.forwards.block(self._inputs(tokens, parents), layers, **wanted)
        self._width = max(len(row) for row in tokens)
        return output

    def _read(
        self, states: SavedStates, tokens: Trees, may_be_undone: bool, layers: Sequence[int] = (), **wanted: Any
    ) -> Output:
        """Score a chain per row, whose tokens enter states that cannot forget them, after what must be read again."""
        if may_be_undone and not self._replay.read[0]:
            states.save()
        again, block = self.replayed, self._replay.block(tokens)
        width = len(block[0])
        output = self.forwards.block(self._inputs(block, [range(-1, width - 1)] * len(block)), layers, **wanted)
        states.has_changed()
        self._replay.extend(block)
        self.slots.extend(width)
        self._width = width - again
        return output.after(again)

    def _inputs(
        self,
        tokens: Trees,
        parents: Trees,
        start: int = 0,
        layers: range | None = None,
        depths: Trees | None = None,
    ) -> dict[str, Any]:
        """Arguments of a forward over the nodes from `start` on, those before it being in the cache already.

        Args:
            tokens, parents: the whole trees.
            start: the first node that runs.
            layers: the layers that run, where not all do. They may hold other slots than the first layer, by which
                models make their own masks, so their masks are made here.
            depths: of the nodes, where they do not follow from the parents.
        """
        width, device = max(len(row) for row in tokens), execution_device(self.model)
        ids = torch.tensor([[*row, *[row[0]] * (width - len(row))][start:] for row in tokens], device=device)
        inputs: dict[str, Any] = {
            self.names.ids: ids,
            "use_cache": True,
            CACHE_KEY: self.cache,
            **self.extras.arguments(ids.shape[1]),
        }
        if self.forwards.takes_positions:
            positions = torch.tensor(
                [
                    [at + depth for depth in [*row, *[0] * (width - len(row))][start:]]
                    for at, row in zip(self.slots.next_position, depths or map(tree.depths, parents), strict=True)
                ],
                device=device,
            )
            inputs[self.names.positions] = positions if self._offsets is None else positions + self._offsets[:, :, None]
        chains = all(tree.is_chain(row) for row in parents)
        windows = self.support.trees and self.has_windows
        if layers is None and (width == 1 or (chains and not windows)):
            # the model's own causal mask; padding at the end of a row is seen by nothing
            valid = self.slots.with_block(width)
            if valid is not None:
                inputs[self.names.mask] = valid.long()
        else:
            kinds = {kind.key: self._mask(kind, parents, width, start, layers) for kind in self.support.masks}
            inputs[self.names.mask] = kinds.get(None, kinds)
        return inputs

    def _mask(self, kind: MaskKind, parents: Trees, width: int, start: int, layers: range | None) -> torch.Tensor:
        """`[B, 1, n, keys]`, of the nodes from `start` on, as those layers of this kind need it that run."""
        reading = [layer for layer in kind.layers if layers is None or layer in layers]
        # where no such layer runs, the mask is asked for but not read
        keys, first = kv.mask_size(self.cache, (reading or kind.layers)[0], width - start)
        allowed = masks.visible(self.slots.all_valid(), parents, width, kind.window)[:, start:, first:]
        form = DENSE_MASKS[attention_of(text_config(self.model))]
        return masks.as_argument(allowed, keys, form, self.model.dtype)

    def attention_layout(self) -> tuple[bool, list[int | None]]:
        """(whether keys fill a static cache, per layer how many keys a plain step of a sliding window sees)."""
        return self.capacity is not None, [kv.window(self.cache, layer) for layer in range(kv.count_layers(self.cache))]

    # ------------------------------------------------------------------ in two halves

    def forward_below(self, halves: Halves, tokens: Trees, parents: Trees) -> torch.Tensor:
        """Run the next nodes of this round's trees through the layers below an exit: the exit's logits `[B, m, V]`.

        The first call of a round brings the roots. Parents count the nodes of all calls; rows may bring fewer nodes
        than others. `forward` goes on from there with the nodes that are verified.
        """
        split, inputs = self._add_below(halves, tokens, parents)
        logits, hidden = self.forwards.below(halves, inputs)
        split.remember(hidden)
        self._split = split
        return logits

    def hidden_below(self, halves: Halves, tokens: Trees, parents: Trees) -> torch.Tensor:
        """As `forward_below`, without the LM head: the hidden states at the exit `[B, m, d]`."""
        split, inputs = self._add_below(halves, tokens, parents)
        hidden = self.forwards.hidden_below(halves, inputs)
        split.remember(hidden)
        self._split = split
        return hidden

    def _add_below(self, halves: Halves, tokens: Trees, parents: Trees) -> tuple[SplitRound, dict[str, Any]]:
        split = self._split or SplitRound(halves, self.batch_size)
        start = split.add(tokens, parents)
        return split, self._inputs(split.tokens, split.parents, start, range(halves.exit_layer), split.depths)

    @property
    def lower_half_ran(self) -> bool:
        """Whether the next forward has only the layers above an exit to run."""
        return self._split is not None

    def drop_lower_half(self) -> None:
        """Forget the nodes that have run through the layers below an exit."""
        if self._split is not None:
            kv.drop_last(self.cache, self._split.size, self._split.halves.exit_layer)
            self._split = None

    def _can_go_on(self, split: SplitRound, tokens: Trees, parents: Trees, layers: Sequence[int]) -> bool:
        """Whether the layers above the exit are enough: missing nodes have a slot, all see what they must."""
        missing = split.find(tokens, parents)[1]
        if any(0 <= layer < split.halves.exit_layer for layer in layers):
            return False
        if self.capacity is not None and self.slots.count + split.size + missing.width > self.capacity:
            return False
        return not self.has_windows or split.fits_windows(missing)

    def _go_on(self, split: SplitRound, tokens: Trees, parents: Trees, layers: Sequence[int]) -> Output:
        """Run the layers above the exit for these trees."""
        halves, width = split.halves, max(len(row) for row in tokens)
        places, missing = split.find(tokens, parents)
        if missing.any:
            self.hidden_below(halves, missing.tokens, missing.parents)
        height, index = split.size, split.reorder(places, width)
        if index is not None:
            kv.gather_block(self.cache, height, index, halves.exit_layer)
            kv.drop_last(self.cache, height - width, halves.exit_layer)
        assert split.hidden is not None
        inputs = self._inputs(tokens, parents, 0, range(halves.exit_layer, halves.num_layers))
        output = self.forwards.above(halves, split.hidden, inputs, layers)
        self._split, self._width = None, width
        return output

    # ------------------------------------------------------------------ committing and rolling back

    def commit(self, kept: Trees, idle: Collection[int] = ()) -> None:
        """Keep these nodes of each row of the last forward (ascending, root first) and drop the others.

        Rows in `idle` are finished: what their slots hold no longer matters, and their position stands still.
        """
        if self._states is not None:
            (length,) = set(map(len, kept))  # rows are in step
            if length == self._width:
                self._replay.keep()
                kv.crop(self.cache, 0)
            self._unread(self._states, self._width - length)
        else:
            self._carry_out(self.slots.commit(kept, self._width, idle))
        self._width = 0

    def _unread(self, states: SavedStates, tokens: int) -> None:
        """Take the last tokens of every row back: the rest of what was read since the states were saved is pending."""
        if tokens:
            unread = self._replay.take_back(tokens)
            self._carry_out(self.slots.take_back([unread] * self.batch_size))
            states.restore()

    def drop_uncommitted(self) -> None:
        """Keep no more of a forward than its roots, which were committed before it. For exceptions in mid-round."""
        self.drop_lower_half()
        if self._width:
            self.commit([[0]] * self.batch_size)

    def append(self, texts: Trees, idle: Collection[int] = ()) -> torch.Tensor:
        """Append a text to every row and commit it: the logits `[B, V]` after each."""
        parents = [list(range(-1, len(text) - 1)) for text in texts]
        last = [len(text) - 1 for text in texts]
        if self._states is not None:
            logits = self._read(self._states, texts, may_be_undone=False).logits[:, -1]
        elif len(set(last)) == 1:
            self._width = len(texts[0])
            logits = self.forwards.last_logits(self._inputs(texts, parents))
        else:
            logits = self.forward(texts, parents).logits[list(range(len(texts))), last]
        self.commit([list(range(len(text))) for text in texts], idle)
        return logits

    def extend(self, tokens: Sequence[int], idle: Collection[int] = ()) -> torch.Tensor:
        """Append one token to every row and score it: logits `[B, V]`. `take_back` undoes it."""
        if self._states is not None:
            return self._read(self._states, [[token] for token in tokens], may_be_undone=True).logits[:, -1]
        logits = self.forward([[token] for token in tokens], [[-1]] * len(tokens)).logits[:, -1]
        self.slots.extend(1, idle)
        return logits

    def take_back(self, counts: Sequence[int], idle: Collection[int] = ()) -> None:
        """Drop the last `counts[b]` tokens of every row. At most what `extend` added since the last commit."""
        if self._states is not None:
            (tokens,) = set(counts)  # rows are in step
            self._unread(self._states, tokens)
        else:
            self._carry_out(self.slots.take_back(counts, idle))
        self._width = 0

    def catch_up(self) -> bool:
        """Read what is pending, if anything is, so that the cache holds all committed tokens but the last."""
        if not self.replayed or self._states is None:
            return False
        pending, self._replay.pending = self._replay.pending, [[] for _ in self._replay.pending]
        self._read(self._states, pending, may_be_undone=False)
        self.commit([range(len(row)) for row in pending])
        return True

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        kv.select_rows(self.cache, rows)
        self.slots.select_rows(rows)
        self.extras = self.extras.of_rows(rows)
        if self._offsets is not None:
            self._offsets = self._offsets[:, list(rows)]

    def _carry_out(self, move: Move) -> None:
        if move.gather is not None:
            kv.gather_block(self.cache, move.width, move.gather)
        if move.drop is not None:
            kv.crop(self.cache, move.drop)
        if move.realign is not None:
            kv.realign(self.cache, move.realign, move.realign.shape[1])
