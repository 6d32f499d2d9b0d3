"""A step's rows cut and laid out for the CUDA path: forwards of few fixed shapes, all that varies in one table. Pure.

Products are made for one of ROW_BUCKETS rows, attention for blocks of one request's rows. Whatever is asked for becomes
one or more forwards of such a shape, in order; a row that is cut off goes into the next forward, where the rows before
it are in the cache already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROW_BUCKETS = (16, 32, 64)  # up to 64 rows a product's time is that of reading its weight
BLOCK_BUCKETS = (1, 2, 4, 8, 16)
# As the kernels read them.
ROW_FIELDS = 4  # of a row: address of the keys, of the values, the cache's capacity, the row's place in it (-1: none)
BLOCK_FIELDS = 6  # of rows of one request: the same three, first row in the batch, number of rows, place of the first
STATE_FIELDS = 2  # of tokens made one after the other: the row that the next one comes after, how many there are
_NO_PLACE = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` rows of a segment from its row `first` on: a block of attention."""

    segment: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment's cache is, and the place of the segment's first row in it."""

    keys: int  # address
    values: int
    capacity: int
    start: int


def forwards(counts: Sequence[int], rows_per_block: int, most_rows: int) -> list[list[Piece]]:
    """Pieces of every forward; all rows come once, in order, and no forward exceeds its rows or blocks."""
    found: list[list[Piece]] = []
    free_rows = 0
    for segment, count in enumerate(counts):
        first = 0
        while first < count:
            if not found or free_rows == 0 or len(found[-1]) == BLOCK_BUCKETS[-1]:
                found.append([])
                free_rows = most_rows
            taken = min(count - first, rows_per_block, free_rows)
            found[-1].append(Piece(segment, first, taken))
            first += taken
            free_rows -= taken
    return found


def bucket(count: int, buckets: Sequence[int]) -> int:
    """The smallest of ascending `buckets` that holds `count`."""
    return next(size for size in buckets if size >= count)


class StepTable:
    """One forward's inputs as one array of int64, so that they reach the device in one copy."""

    def __init__(self, most_rows: int, storage: NDArray[np.int64]) -> None:
        self.ids, self.positions, self.rows, self.blocks, self.state = (
            storage[part].reshape(shape) for part, shape in layout(most_rows)
        )

    def fill(
        self, pieces: Sequence[Piece], ids: Sequence[int], positions: Sequence[int], places: Sequence[Place]
    ) -> None:
        """`ids` and `positions` are those of the forward's rows, `places` those of all segments."""
        count = len(ids)
        self.ids[:count], self.positions[:count] = ids, positions
        self.ids[count:], self.positions[count:] = 0, 0
        self.rows[count:, ROW_FIELDS - 1] = _NO_PLACE
        self.blocks[len(pieces) :] = 0
        self.state[:] = count - 1, 0
        row = 0
        for index, piece in enumerate(pieces):
            place = places[piece.segment]
            start = place.start + piece.first
            lines = slice(row, row + piece.count)
            self.rows[lines, :3] = place.keys, place.values, place.capacity
            self.rows[lines, 3] = range(start, start + piece.count)
            self.blocks[index] = place.keys, place.values, place.capacity, row, piece.count, start
            row += piece.count


def layout(most_rows: int) -> list[tuple[slice, tuple[int, ...]]]:
    """Where ids, positions, rows, blocks and state lie in the array, and their shapes."""
    shapes: tuple[tuple[int, ...], ...] = (
        (most_rows,),
        (most_rows,),
        (most_rows, ROW_FIELDS),
        (BLOCK_BUCKETS[-1], BLOCK_FIELDS),
        (STATE_FIELDS,),
    )
    found, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append((slice(at, at + size), shape))
        at += size
    return found


def table_size(most_rows: int) -> int:
    """Length of the array."""
    return sum(math.prod(shape) for _, shape in layout(most_rows))
