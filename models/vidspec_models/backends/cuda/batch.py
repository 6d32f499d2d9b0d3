"""Layout of a step's rows for the CUDA path: forwards of few fixed shapes, with everything variable in one table.

Products are computed for one of ROW_BUCKETS rows, attention for blocks of one request's rows. A batch becomes one or
more forwards of such a shape, in order; a request's rows that do not fit go into the next forward, when the rows before
them are in the cache already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vidspec_models.decoder.decoder import Segment

ROW_BUCKETS = (16, 32, 64)  # up to 64 rows, a product takes only the time to read its weight
BLOCK_BUCKETS = (1, 2, 4, 8, 16)
# Table layouts that the kernels read.
ROW_FIELDS = 4  # per row: addresses of keys and of values, the cache's capacity, the row's place in it (-1: none)
BLOCK_FIELDS = 6  # per block: the same first three, first row in the batch, number of rows, place of the first row
STATE_FIELDS = 2  # when running ahead: the row whose logits give the next token, number of tokens so far
_NO_PLACE = -1


def forwards(segments: Sequence[Segment], rows_per_block: int, most_rows: int) -> list[list[Segment]]:
    """Attention blocks per forward. Every row comes once, in order; no forward exceeds its most rows or blocks."""
    found: list[list[Segment]] = []
    free_rows = 0
    for segment in segments:
        first = 0
        while first < segment.num_rows:
            if not found or free_rows == 0 or len(found[-1]) == BLOCK_BUCKETS[-1]:
                found.append([])
                free_rows = most_rows
            taken = min(segment.num_rows - first, rows_per_block, free_rows)
            found[-1].append(Segment(segment.cache, segment.start + first, taken))
            first += taken
            free_rows -= taken
    return found


def bucket(count: int, buckets: Sequence[int]) -> int:
    """The smallest of ascending `buckets` that holds `count`."""
    return next(size for size in buckets if size >= count)


class StepInputs(NamedTuple):
    """One forward's inputs: views of one int64 array (NumPy or torch), so that a single copy moves it to the device."""

    ids: Any  # [rows]
    positions: Any  # [rows]
    rows: Any  # [rows, ROW_FIELDS]
    blocks: Any  # [blocks, BLOCK_FIELDS]
    state: Any  # [STATE_FIELDS]

    @classmethod
    def of(cls, array: Any, most_rows: int) -> StepInputs:
        """Views of an array of length `num_inputs(most_rows)`."""
        return cls(*(array[part].reshape(shape) for part, shape in _layout(most_rows)))

    def fill(self, blocks: Sequence[Segment], ids: Sequence[int], positions: Sequence[int]) -> None:
        """Write the inputs of a forward over `blocks`; `ids` and `positions` have one entry per row."""
        count = len(ids)
        self.ids[:count], self.positions[:count] = ids, positions
        self.ids[count:], self.positions[count:] = 0, 0
        self.rows[count:, ROW_FIELDS - 1] = _NO_PLACE
        self.blocks[len(blocks) :] = 0
        self.state[:] = count - 1, 0
        row = 0
        for index, block in enumerate(blocks):
            place = block.cache.keys.data_ptr(), block.cache.values.data_ptr(), block.cache.capacity
            lines = slice(row, row + block.num_rows)
            self.rows[lines, :3] = place
            self.rows[lines, 3] = range(block.start, block.start + block.num_rows)
            self.blocks[index] = *place, row, block.num_rows, block.start
            row += block.num_rows


def _layout(most_rows: int) -> list[tuple[slice, tuple[int, ...]]]:
    """Slices of ids, positions, rows, blocks and state in the array, and their shapes."""
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


def num_inputs(most_rows: int) -> int:
    """Length of the array that `StepInputs` views."""
    return sum(math.prod(shape) for _, shape in _layout(most_rows))
