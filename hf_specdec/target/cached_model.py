"""A model with its cache: score a block of token trees, keep each row's accepted path, drop the rest.

Positions are explicit and masks are built from what each slot holds, never from slot numbers, so that rows of a batch
may have advanced by different lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import tree
from ..host.names import CACHE_KEY
from . import kv_cache as kv
from .few_rows import quick_on_few_rows
from .halves import Halves, Handover, watch
from .support import DENSE_MASKS, MaskKind, Support

# Holes are squeezed out once they are more than this part of the slots
MOST_HOLES = 0.25


@dataclass
class _Begun:
    """Trees whose nodes have run through the layers below an exit, and wait for those above."""

    halves: Halves
    # per row, equally many; rows that had fewer are filled with copies of their root, which nothing sees
    tokens: list[list[int]]
    parents: list[list[int]]
    # places after the root's; 0 for what rows are filled with, since there may be no place after the root's
    depths: list[list[int]]
    # [B, p, d]: what the layers below the exit made of them
    hidden: torch.Tensor
    # per row: (parent, token) -> node
    known: list[dict[tuple[int, int], int]]


class CachedModel:
    """A causal language model whose cache holds the committed tokens of every row, save the last.

    Args:
        model: the model.
        support: what it can take part in.
        cache: its cache, holding the prompt, recording its past.
        padding: `[B, slots]`, True where a slot holds a token; None where all do.
        next_position: per row, the position of the next token.
    """

    def __init__(
        self,
        model: Any,
        support: Support,
        cache: Any,
        padding: torch.Tensor | None,
        next_position: Sequence[int],
    ) -> None:
        self.model = model
        self._on_few_rows = quick_on_few_rows(model)
        self.support = support
        self.cache = cache
        self.valid = padding
        self.next_position = list(next_position)
        self.rows = list(range(len(self.next_position)))  # which rows of the batch it carries, in order
        self.slots = kv.slots(cache)
        self.capacity = kv.capacity(cache)
        self._width = 0
        self._begun: _Begun | None = None
        # exit whose hidden states the forwards leave in `tapped [B, n, d]`, for drafters that read them
        self.tap: int | None = None
        self.tapped: torch.Tensor | None = None
        self._with_positions = _takes_positions(model)
        # some models leave their window to the cache, which shows a block more than each of its tokens may see
        self.has_windows = kv.has_windows(cache)
        self._masks_windows = support.trees and self.has_windows
        # holes need masks made from what slots hold; windows and static caches have no slots to spare for them
        self._holes = support.trees and not self.has_windows and self.capacity is None

    @classmethod
    def filled(cls, model: Any, support: Support, texts: Sequence[Sequence[int]]) -> tuple[CachedModel, torch.Tensor]:
        """A model whose new cache holds these texts, padded on the left, and the logits `[B, V]` after each."""
        longest = max(map(len, texts))
        padding = [longest - len(text) for text in texts]
        device = model.device
        ids = torch.tensor([[0] * pad + list(text) for text, pad in zip(texts, padding, strict=True)], device=device)
        valid = torch.arange(longest, device=device) >= torch.tensor(padding, device=device)[:, None]
        cache = kv.new_cache(model.config.get_text_config(decoder=True))
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, CACHE_KEY: cache}
        if any(padding):
            inputs["attention_mask"] = valid.long()
        if _takes_positions(model):
            inputs["position_ids"] = (valid.long().cumsum(-1) - 1).clamp(min=0)
        inputs.update(_last_logits_only(model))
        logits = model(**inputs, return_dict=True).logits[:, -1]
        kv.crop(cache, 0)
        return cls(model, support, cache, valid if any(padding) else None, [len(text) for text in texts]), logits

    @property
    def batch_size(self) -> int:
        return len(self.next_position)

    def forward(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], **model_kwargs: Any) -> Any:
        """Score a tree per row in one forward. Logits `[B, n, V]`; rows with fewer nodes are padded at the end.

        What `forward_below` has begun is finished: only the layers above that exit run, unless more is asked for than
        logits.
        """
        if self._begun is not None:
            if not model_kwargs and self._can_finish(self._begun, tokens, parents):
                return self._finish(tokens, parents)
            self.abandon()
        self._width = max(len(row) for row in tokens)
        if self.tap is None:
            return self._on_few_rows(**self._inputs(tokens, parents), **model_kwargs, return_dict=True)
        seen: dict[int, Handover] = {}
        with watch(self.model, [self.tap], None, seen):
            output = self._on_few_rows(**self._inputs(tokens, parents), **model_kwargs, return_dict=True)
        self.tapped = seen[self.tap].hidden
        return output

    def _inputs(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        start: int = 0,
        layers: range | None = None,
        depths: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Arguments of a forward over the nodes from `start` on, those before it being in the cache already.

        Args:
            tokens, parents: the whole trees.
            start: the first node that runs.
            layers: the layers that run, where not all do. They may hold other slots than the first layer, by which
                models make their own masks, so their masks are made here.
            depths: of the nodes, where they do not follow from the parents.
        """
        width = max(len(row) for row in tokens)
        device = self.model.device
        ids = torch.tensor([[*row, *[row[0]] * (width - len(row))][start:] for row in tokens], device=device)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, CACHE_KEY: self.cache}
        if self._with_positions:
            inputs["position_ids"] = torch.tensor(
                [
                    [at + depth for depth in [*row, *[0] * (width - len(row))][start:]]
                    for at, row in zip(self.next_position, depths or map(tree.depths, parents), strict=True)
                ],
                device=device,
            )
        chains = all(tree.is_chain(row) for row in parents)
        if layers is None and (width == 1 or (chains and not self._masks_windows)):
            # the model's own causal mask; padding at the end of a row is seen by nothing
            if self.valid is not None:
                inputs["attention_mask"] = torch.cat(
                    [self.valid, self.valid.new_ones(self.batch_size, width)], dim=1
                ).long()
        else:
            masks = {kind.key: self._tree_mask(kind, parents, width, start, layers) for kind in self.support.masks}
            inputs["attention_mask"] = masks.get(None, masks)
        return inputs

    # ------------------------------------------------------------------ in two halves

    def forward_below(
        self, halves: Halves, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Run the next nodes of this round's trees through the layers below an exit: the exit's logits `[B, m, V]`.

        The first call of a round brings the roots. Parents count the nodes of all calls; rows may bring fewer nodes
        than others. `forward` goes on from there with the nodes that are verified.
        """
        return self._begin(halves, tokens, parents, halves.below).logits

    def hidden_below(
        self, halves: Halves, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """As `forward_below`, without the LM head: the hidden states at the exit `[B, m, d]`."""
        self._begin(halves, tokens, parents, halves.below_headless)
        assert self._begun is not None
        return self._begun.hidden[:, -max(map(len, tokens)) :]

    @property
    def has_begun(self) -> bool:
        """Whether the next forward has only the layers above an exit to run."""
        return self._begun is not None

    def abandon(self) -> None:
        """Forget what `forward_below` has begun."""
        if self._begun is not None:
            kv.drop_last(self.cache, len(self._begun.tokens[0]), self._begun.halves.exit_layer)
            self._begun = None

    def _begin(
        self, halves: Halves, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], part: Any
    ) -> Any:
        begun = self._begun
        if begun is None:
            batch = range(self.batch_size)
            begun = _Begun(
                halves,
                tokens=[[] for _ in batch],
                parents=[[] for _ in batch],
                depths=[[] for _ in batch],
                hidden=torch.empty(0),
                known=[{} for _ in batch],
            )
        start, width = len(begun.tokens[0]), max(map(len, tokens))
        roots = [known[0] if known else new[0] for known, new in zip(begun.tokens, tokens, strict=True)]
        all_tokens = [
            [*known, *new, *[root] * (width - len(new))]
            for known, new, root in zip(begun.tokens, tokens, roots, strict=True)
        ]
        all_parents = [
            [*known, *new, *[0] * (width - len(new))] for known, new in zip(begun.parents, parents, strict=True)
        ]
        depths = [
            [*known, *tree.depths(row)[start : start + len(new)], *[0] * (width - len(new))]
            for known, row, new in zip(begun.depths, all_parents, tokens, strict=True)
        ]
        inputs = self._inputs(all_tokens, all_parents, start, range(halves.exit_layer), depths)
        with halves.taken() as taken:
            output = part(**inputs, **halves.quiet, return_dict=True)
        hidden = taken.hidden
        assert hidden is not None
        for known, new, new_parents in zip(begun.known, tokens, parents, strict=True):
            for index, (token, parent) in enumerate(zip(new, new_parents, strict=True)):
                known[parent, token] = start + index
        begun.tokens, begun.parents, begun.depths = all_tokens, all_parents, depths
        begun.hidden = hidden if start == 0 else torch.cat([begun.hidden, hidden], dim=1)
        self._begun = begun
        return output

    def _places(
        self, begun: _Begun, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Where each node of these trees stands among those begun, and the tokens and parents that are not there yet.

        Those are counted on after the ones begun, as `_begin` will place them.
        """
        start = len(begun.tokens[0])
        places: list[list[int]] = []
        missing: list[list[int]] = []
        missing_parents: list[list[int]] = []
        for known, row, row_parents in zip(begun.known, tokens, parents, strict=True):
            at: list[int] = []
            new: list[int] = []
            new_parents: list[int] = []
            for token, parent in zip(row, row_parents, strict=True):
                above = -1 if parent < 0 else at[parent]
                place = known.get((above, token))
                if place is None:
                    place = start + len(new)
                    new.append(token)
                    new_parents.append(above)
                at.append(place)
            places.append(at)
            missing.append(new)
            missing_parents.append(new_parents)
        return places, missing, missing_parents

    def _can_finish(self, begun: _Begun, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> bool:
        """Whether those not begun yet have a slot, and all nodes saw what they must, or will.

        A window shows the latest slots only, which is right where places and slots go together: in one chain.
        """
        start, missing_nodes = len(begun.tokens[0]), self._places(begun, tokens, parents)[2]
        if self.capacity is not None and self.slots + start + max(map(len, missing_nodes)) > self.capacity:
            return False
        if not self.has_windows:
            return True
        return all(
            depths[: len(known)] == list(range(len(known)))
            and (not missing or missing == list(range(start - 1, start - 1 + len(missing))))
            and (not missing or len(known) == start)
            for depths, known, missing in zip(begun.depths, begun.known, missing_nodes, strict=True)
        )

    def _finish(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Any:
        """Run the layers above the exit for these trees."""
        begun = self._begun
        assert begun is not None
        halves = begun.halves
        places, missing, missing_parents = self._places(begun, tokens, parents)
        if any(missing):
            self._begin(halves, missing, missing_parents, halves.below_headless)
        height, width = len(begun.tokens[0]), max(len(row) for row in tokens)
        if any(place != list(range(height)) for place in places):
            index = torch.tensor([[*place, *[0] * (width - len(place))] for place in places])
            kv.gather_block(self.cache, height, index, halves.exit_layer)
            kv.drop_last(self.cache, height - width, halves.exit_layer)
            index = index.to(begun.hidden.device)[..., None].expand(-1, -1, begun.hidden.shape[-1])
            begun.hidden = begun.hidden.gather(1, index)
        if self.tap == halves.exit_layer:
            self.tapped = begun.hidden
        layers = range(halves.exit_layer, halves.num_layers)
        with halves.given(begun.hidden):
            output = halves.above(**self._inputs(tokens, parents, 0, layers), **halves.quiet, return_dict=True)
        self._begun, self._width = None, width
        return output

    def commit(self, kept: Sequence[Sequence[int]], idle: Collection[int] = ()) -> None:
        """Keep these nodes of each row of the last forward (ascending, root first) and drop the others.

        Rows in `idle` are finished: what their slots hold no longer matters, and their position stands still.
        """
        longest = max(len(nodes) for row, nodes in enumerate(kept) if row not in idle)
        rows = [list(range(longest)) if row in idle else list(nodes) for row, nodes in enumerate(kept)]
        ragged = any(len(nodes) != longest for nodes in rows)
        if not ragged and (longest == 0 or all(nodes[-1] == longest - 1 for nodes in rows)):
            kv.crop(self.cache, self._width - longest)
        elif not ragged or self._holes:
            padded = torch.tensor([nodes + [0] * (longest - len(nodes)) for nodes in rows])
            kv.gather_block(self.cache, self._width, padded)
            kv.crop(self.cache, self._width - longest)
        if ragged and not self._holes:
            self._realign(rows, idle)
        else:
            self._grow_valid(rows, longest, ragged)
            self.slots += longest
        for row, nodes in enumerate(rows):
            self.next_position[row] += 0 if row in idle else len(nodes)
        self._width = 0
        holes = ragged and self.valid is not None and int(self.valid.sum(1).max()) < (1 - MOST_HOLES) * self.slots
        if holes or (idle and self.capacity is not None):  # a static cache has no room for what idle rows had
            self.compact(idle)

    def append(self, texts: Sequence[Sequence[int]], idle: Collection[int] = ()) -> torch.Tensor:
        """Append a text to every row and commit it: the logits `[B, V]` after each."""
        parents = [list(range(-1, len(text) - 1)) for text in texts]
        last = [len(text) - 1 for text in texts]
        even = len(set(last)) == 1
        logits = self.forward(texts, parents, **(_last_logits_only(self.model) if even else {})).logits
        self.commit([list(range(len(text))) for text in texts], idle)
        return logits[:, -1] if even else logits[list(range(len(texts))), last]

    def extend(self, tokens: Sequence[int], idle: Collection[int] = ()) -> torch.Tensor:
        """Append one token to every row and score it: logits `[B, V]`. `take_back` undoes it."""
        logits = self.forward([[token] for token in tokens], [[-1]] * len(tokens)).logits[:, -1]
        self._grow_valid([[0]] * self.batch_size, 1, ragged=False)
        self.slots += 1
        self.next_position = [at + (row not in idle) for row, at in enumerate(self.next_position)]
        return logits

    def take_back(self, counts: Sequence[int], idle: Collection[int] = ()) -> None:
        """Drop the last `counts[b]` tokens of every row. At most what `extend` added since the last commit."""
        block = max(counts)
        self._width = block
        self.slots -= block
        self.next_position = [at - block * (row not in idle) for row, at in enumerate(self.next_position)]
        if self.valid is not None:
            self.valid = self.valid[:, : self.slots]
        self.commit([list(range(block - count)) for count in counts], idle)

    def compact(self, idle: Collection[int] = ()) -> None:
        """Squeeze the holes out: every row's tokens at the end of the slots, padding before them."""
        if self.valid is not None:
            self._squeeze(self.valid, idle)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        kv.select_rows(self.cache, rows)
        self.rows = [self.rows[row] for row in rows]
        self.next_position = [self.next_position[row] for row in rows]
        if self.valid is not None:
            self.valid = self.valid[torch.tensor(list(rows), device=self.valid.device)]

    # ------------------------------------------------------------------ bookkeeping of slots

    def _block_valid(self, rows: list[list[int]], width: int) -> torch.Tensor:
        """`[B, width]`: True at the kept nodes of each row."""
        block = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, nodes in enumerate(rows):
            block[row, nodes] = True
        return block.to(self.model.device)

    def _all_valid(self) -> torch.Tensor:
        return torch.ones(self.batch_size, self.slots, dtype=torch.bool, device=self.model.device)

    def _grow_valid(self, rows: list[list[int]], longest: int, ragged: bool) -> None:
        if self.valid is None and not ragged:
            return
        past = self.valid if self.valid is not None else self._all_valid()
        block = self._block_valid([list(range(len(nodes))) for nodes in rows], longest)
        self.valid = torch.cat([past, block], dim=1)

    def _squeeze(self, valid: torch.Tensor, idle: Collection[int]) -> None:
        """Rebuild the cache from its valid slots `valid [B, slots]`: each row's at the end, padding before them."""
        running = [row for row in range(self.batch_size) if row not in idle]
        total = int(valid.sum(1)[running].max())
        order = torch.sort(valid.int(), dim=1, stable=True).indices
        source = order[:, order.shape[1] - total :]
        kv.realign(self.cache, source, total)
        valid = valid.gather(1, source)
        self.valid = None if bool(valid.all()) else valid
        self.slots = total

    def _realign(self, rows: list[list[int]], idle: Collection[int]) -> None:
        past = self.valid if self.valid is not None else self._all_valid()
        valid = torch.cat([past, self._block_valid(rows, self._width)], dim=1)
        self._squeeze(valid, idle)

    # ------------------------------------------------------------------ tree attention

    def _tree_mask(
        self, kind: MaskKind, parents: Sequence[Sequence[int]], width: int, start: int, layers: range | None
    ) -> torch.Tensor:
        """`[B, 1, n, keys]`: each node sees the past and its own ancestors, as far as the layer's window reaches.

        For the nodes from `start` on, as layers of this kind need it, of those that run.
        """
        device = self.model.device
        reading = [layer for layer in kind.layers if layers is None or layer in layers]
        # where no such layer runs, the mask is asked for but not read
        keys, first = kv.mask_size(self.cache, (reading or kind.layers)[0], width - start)
        batch = len(parents)
        block = torch.zeros(batch, width, width, dtype=torch.bool)
        depth = torch.zeros(batch, width, dtype=torch.long)
        for row, row_parents in enumerate(parents):
            n = len(row_parents)
            block[row, :n, :n] = torch.tensor(tree.ancestors(row_parents))
            depth[row, :n] = torch.tensor(tree.depths(row_parents))
        block |= torch.eye(width, dtype=torch.bool)  # padding sees itself, so that no row of the softmax is empty
        past = (self.valid if self.valid is not None else self._all_valid())[:, None].expand(-1, width, -1)
        if kind.window is not None:
            # slots of a windowed layer have no holes, so distances between slots are distances between positions
            slot = torch.arange(self.slots)
            near = self.slots + depth[:, :, None] - slot < kind.window
            past = past & near.to(device)
            block &= depth[:, :, None] - depth[:, None, :] < kind.window
        allowed = torch.cat([past, block.to(device)], dim=-1)[:, start:, first:]
        if allowed.shape[-1] < keys:
            allowed = torch.nn.functional.pad(allowed, (0, keys - allowed.shape[-1]))
        allowed = allowed[:, None]
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        if DENSE_MASKS[attention] == "boolean":
            return allowed
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros(allowed.shape, dtype=self.model.dtype, device=device).masked_fill_(~allowed, lowest)

    def attention_layout(self, layer: int) -> tuple[bool, int | None]:
        """(whether a layer's keys fill a static cache, how many keys a plain step of a sliding window sees)."""
        return self.capacity is not None, kv.window(self.cache, layer)


def _last_logits_only(model: Any) -> dict[str, int]:
    """The argument that spares a model the scores of all tokens but the last, where it takes it."""
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters
