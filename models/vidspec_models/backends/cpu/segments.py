"""Segments in the form that kernels take: one row of numbers per segment, with the places of rows, keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.backends.cpu.packing import STRIP
from vidspec_models.decoder.decoder import Segment
from vidspec_models.decoder.kv_cache import KVCache

# First row; number of rows; cache rows before them; addresses of keys and of values; capacity; number of hidden rows at
# the cache's front, and from which layer on they are hidden (see `HiddenRows`); address of the transposed keys or 0;
# number of rows whose transposed keys are already stored.
FIRST, NUM_ROWS, START, KEYS, VALUES, CAPACITY, HIDDEN, FIRST_HIDDEN_LAYER, COLUMNS, KEPT = range(10)


def described(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """One table row per segment; the segments' rows follow one another in the batch."""
    table = np.empty((len(segments), KEPT + 1), np.int64)
    row = 0
    for i, segment in enumerate(segments):
        cache, hidden = segment.cache, segment.cache.hidden
        columns = _key_columns(cache) if hidden is None else None
        table[i] = (
            row,
            segment.num_rows,
            segment.start,
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            cache.capacity,
            0 if hidden is None else hidden.count,
            0 if hidden is None else hidden.first_layer,
            0 if columns is None else columns.data_ptr(),
            min(cache.num_columns, segment.start) // STRIP * STRIP,
        )
        row += segment.num_rows
    return table


def _key_columns(cache: KVCache) -> Tensor:
    if cache.key_columns is None:
        layers, _, kv_heads, capacity, width = cache.keys.shape
        cache.key_columns = cache.keys.new_empty(layers, kv_heads, -(-capacity // STRIP), width, STRIP)
    return cache.key_columns


def note_columns(segments: Sequence[Segment], table: NDArray[np.int64]) -> None:
    """Update in each cache for how many rows the transposed keys are stored."""
    for segment, kept in zip(segments, table[:, KEPT].tolist(), strict=True):
        segment.cache.num_columns = kept
