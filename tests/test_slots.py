"""Bookkeeping of slots, without a model: against a cache that is a list per row, and by hand."""

from __future__ import annotations

import random

import pytest
import torch

from hf_specdec.target.masks import as_argument, visible
from hf_specdec.target.slots import MOST_HOLES, Move, Slots


class PlainCache:
    """Keeps, per row, what each slot holds: a token, or None for padding. Carries out moves as a KV cache must."""

    def __init__(self, rows: list[list[int | None]]) -> None:
        self.rows = rows

    def forward(self, blocks: list[list[int]]) -> None:
        for row, block in zip(self.rows, blocks, strict=True):
            row.extend(block)

    def carry_out(self, move: Move) -> None:
        for index, row in enumerate(self.rows):
            if move.gather is not None:
                block = row[-move.width :]
                kept = [block[node] for node in move.gather[index].tolist()]
                row[-move.width :] = [*kept, *block[len(kept) :]]
            if move.drop:
                del row[-move.drop :]
            if move.realign is not None:
                row[:] = [row[slot] for slot in move.realign[index].tolist()]

    def texts(self, slots: Slots) -> list[list[int | None]]:
        """What the valid slots of each row hold."""
        valid = slots.all_valid().tolist()
        assert {len(row) for row in self.rows} == {slots.count}
        return [
            [t for t, is_valid in zip(row, mask, strict=True) if is_valid]
            for row, mask in zip(self.rows, valid, strict=True)
        ]


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_kept_the_slots_hold_the_texts(holes: bool, fixed: bool, seed: int) -> None:
    """Random trees, random accepted paths, rows that finish: the valid slots of a row are its text, in order."""
    rng, batch, counter = random.Random(seed), 3, iter(range(10_000))
    padding = [rng.randrange(3) for _ in range(batch)]
    texts = [[next(counter) for _ in range(5 - pad)] for pad in padding]
    valid = torch.tensor([[False] * pad + [True] * (5 - pad) for pad in padding])
    slots = Slots(
        5, [5 - pad for pad in padding], valid if any(padding) else None, holes=holes and not fixed, fixed=fixed
    )
    cache = PlainCache([[None] * pad + list(text) for pad, text in zip(padding, texts, strict=True)])
    idle: set[int] = set()
    for _ in range(25):
        width = rng.randrange(1, 6)
        blocks = [[next(counter) for _ in range(width)] for _ in range(batch)]
        cache.forward(blocks)
        kept = [[0, *sorted(rng.sample(range(1, width), rng.randrange(width)))] for _ in range(batch)]
        cache.carry_out(slots.commit(kept, width, idle))
        for row in set(range(batch)) - idle:
            texts[row] += [blocks[row][node] for node in kept[row]]
        found = cache.texts(slots)
        for row in set(range(batch)) - idle:
            assert found[row] == texts[row]
            assert slots.next_position[row] == len(texts[row])
        assert not slots.holes or max(map(len, found)) >= (1 - MOST_HOLES) * slots.count
        if len(idle) < batch - 1 and rng.random() < 0.1:
            idle.add(rng.choice([row for row in range(batch) if row not in idle]))


def test_rows_that_keep_equally_much_need_no_mask() -> None:
    slots = Slots(4, [4, 4])
    assert slots.commit([[0, 1], [0, 1]], width=3) == Move(width=3, drop=1)
    assert (slots.count, slots.next_position, slots.valid) == (6, [6, 6], None)
    move = slots.commit([[0, 2], [0, 1]], width=3)
    assert move.gather is not None
    assert move.gather.tolist() == [[0, 2], [0, 1]]
    assert (move.drop, move.realign, slots.valid) == (1, None, None)


def test_a_shorter_row_leaves_a_hole() -> None:
    slots = Slots(4, [4, 4])
    move = slots.commit([[0, 1, 2], [0]], width=3)
    assert move.gather is not None
    assert move.gather.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert slots.valid is not None
    assert slots.valid.tolist() == [[True] * 7, [True] * 5 + [False] * 2]
    assert slots.next_position == [7, 5]


def test_without_holes_rows_are_realigned() -> None:
    slots = Slots(4, [4, 4], holes=False)
    move = slots.commit([[0, 1, 2], [0]], width=3)
    assert (move.gather, move.drop) == (None, None)
    assert move.realign is not None
    # row 1 has 5 tokens; two slots of padding, those that were dropped, stand before them
    assert move.realign.tolist() == [[0, 1, 2, 3, 4, 5, 6], [5, 6, 0, 1, 2, 3, 4]]
    assert slots.valid is not None
    assert slots.valid.tolist() == [[True] * 7, [False] * 2 + [True] * 5]


def test_many_holes_are_squeezed_out() -> None:
    slots = Slots(2, [2, 2])
    for turn in range(8):
        longest, shortest = [0, 1, 2, 3], [0]
        move = slots.commit([longest, shortest] if turn % 2 else [shortest, longest], width=4)
        if move.realign is not None:
            break
    assert move.realign is not None
    assert slots.count == max(slots.next_position)


def test_extending_can_be_taken_back() -> None:
    slots = Slots(3, [3, 3], holes=False)
    for _ in range(3):
        slots.extend()
    assert (slots.count, slots.next_position) == (6, [6, 6])
    move = slots.take_back([1, 3])
    assert slots.next_position == [5, 3]
    assert move.realign is not None
    # each row's last ones are dropped: row 0 keeps 5 slots, row 1 its first 3, behind padding
    assert move.realign.tolist() == [[0, 1, 2, 3, 4], [4, 5, 0, 1, 2]]


def test_rows_can_be_left_behind() -> None:
    slots = Slots(2, [2, 1, 2], torch.tensor([[True, True], [False, True], [True, True]]))
    slots.select_rows([1, 2])
    assert slots.rows == [1, 2]
    assert slots.next_position == [1, 2]
    slots.select_rows([0])
    assert slots.rows == [1]
    assert slots.all_valid().tolist() == [[False, True]]


# ---------------------------------------------------------------- masks


def test_a_node_sees_the_past_and_its_ancestors() -> None:
    past = torch.tensor([[False, True]])
    #  0 -+- 1 --- 3
    #     +- 2
    seen = visible(past, [[-1, 0, 0, 1]], width=4)
    assert seen.int().tolist() == [[[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 1]]]


def test_a_window_counts_depths_not_nodes() -> None:
    seen = visible(torch.ones(1, 3, dtype=torch.bool), [[-1, 0, 0, 1]], width=4, window=3)
    # the root at position 3 sees 1 to 3; its children at 4 see 2 to 4; the grandchild at 5 sees 3 to 5
    assert seen.int().tolist() == [
        [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0, 1]]
    ]


def test_padding_of_shorter_rows_sees_itself() -> None:
    seen = visible(torch.zeros(2, 0, dtype=torch.bool), [[-1, 0], [-1]], width=2)
    assert seen[1].int().tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_masks_as_models_take_them(form: str) -> None:
    allowed = torch.tensor([[[True, False]]])
    mask = as_argument(allowed, keys=3, form=form, dtype=torch.float32)
    assert mask.shape == (1, 1, 1, 3)
    if form == "boolean":
        assert mask.tolist() == [[[[True, False, False]]]]
    else:
        lowest = torch.finfo(torch.float32).min
        assert mask.tolist() == [[[[0.0, lowest, lowest]]]]
