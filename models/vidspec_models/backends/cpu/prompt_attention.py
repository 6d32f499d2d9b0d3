"""Attention of a prompt's rows: the same tiles as in a step, for any number of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vidspec_models.backends.cpu.kernel_cache import compiled
from vidspec_models.backends.cpu.layers import FLOAT, attend, room_for_scores
from vidspec_models.backends.cpu.packing import LANES, MAX_LINES, STRIP, Array
from vidspec_models.backends.cpu.tiles import copy_line, transpose_lines
from vidspec_models.core_share import CoreShare

_WORTH_SHARING = 4_000_000  # scores; with fewer, threads gain nothing, as torch's waiting threads occupy their cores


class PromptAttention:
    """Like `attend_causally`; on one core torch's kernel takes three times as long (bfloat16, Zen 4, 525 rows)."""

    def __init__(self, dtype: torch.dtype, cores: CoreShare) -> None:
        """`dtype` is float32, or bfloat16 where the processor multiplies it."""
        self._cores = cores
        line = torch.zeros(1, 1, 2 * LANES, dtype=dtype)
        self(line, line[None], line[None], 1.0)  # compiles the kernels, or loads them from an earlier start's cache

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Causal attention of a sequence's last n rows.

        queries [n, H, D]; keys and values [1, KV, context, D], context n or more. Returns [n, H * D].
        """
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads, context = keys.shape[1:3]
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        start, capacity = context - num_rows, keys.stride(1) // head_dim
        arrays = (_numbers(queries.contiguous()), keys.data_ptr(), values.data_ptr(), capacity, _numbers(out))
        scores = num_heads * num_rows * (start + num_rows // 2)
        is_shared = scores > _WORTH_SHARING and self._cores.num_threads > 1
        block = MAX_LINES if is_shared else num_rows  # small blocks: the last rows take longest
        parts = [
            (*arrays, num_kv_heads, head, start, first, min(first + block, num_rows), scale)
            for first in range(0, num_rows, block)
            for head in range(num_kv_heads)
        ]
        if is_shared:
            self._cores.parallel_for(lambda part: attend_rows(*part), parts)
        else:
            for part in parts:
                attend_rows(*part)
        return out.view(num_rows, num_heads * head_dim)


@compiled
def attend_rows(
    queries: Array, keys: int, values: int, capacity: int, out: Array, num_kv_heads: int, kv: int, start: int,
    first: int, last: int, scale: float,
) -> None:  # fmt: skip
    """Rows first..last of queries [n, H, D], for one key/value head; row i sees rows 0..start+i of the cache.

    out [n, H, D]; keys and values are the addresses of [KV, capacity, D].
    """
    width = queries.shape[2]
    group, num_vectors = queries.shape[1] // num_kv_heads, width // LANES
    line_bytes = width * queries.itemsize
    place = kv * capacity * line_bytes
    num_columns = (start + last) // STRIP * STRIP  # keys to transpose, once for all rows
    columns = np.empty(num_columns * line_bytes // FLOAT, np.float32)
    for key in range(0, num_columns * line_bytes, STRIP * line_bytes):
        transpose_lines(keys + place + key, STRIP, line_bytes // FLOAT // LANES, columns.ctypes.data + key)
    at_once = MAX_LINES // group
    lines = np.empty((MAX_LINES, width), queries.dtype)
    mixed = np.empty((MAX_LINES, width), np.float32)
    scores = room_for_scores(start + last)
    for row in range(first, last, at_once):
        count = min(at_once, last - row) * group
        for line in range(count):
            asking = queries[row + line // group, kv * group + line % group]
            for column in range(width):
                lines[line, column] = asking[column]
        attend(
            lines, count, group, keys + place, values + place, np.int64(columns.ctypes.data), num_columns,
            start + row + 1, scale, scores, mixed,
        )  # fmt: skip
        for line in range(count):
            target = out[row + line // group, kv * group + line % group]
            copy_line(queries, mixed[line].ctypes.data, target.ctypes.data, num_vectors)


def _numbers(tensor: Tensor) -> Array:
    """A view of the same memory, as uint16 for bfloat16, which numpy lacks."""
    numbers: Array = (tensor if tensor.dtype is torch.float32 else tensor.view(torch.uint16)).numpy()
    return numbers
