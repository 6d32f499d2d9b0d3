"""CpuPrompt: a prompt's rows through all layers in compiled kernels, with blocks of rows in parallel on threads.

The kernels are those of a step, so a row's bits do not depend on how a prompt is cut into chunks and blocks. Measured
with AVX2 and AVX-512 (docs/benchmark-log.md), they save torch's time between products, in int8 nearly half of the
products' time, and in bfloat16 a sixth of all time on Zen 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vidspec_models.backends.cpu.kernel_cache import compiled
from vidspec_models.backends.cpu.layer_halves import Rows
from vidspec_models.backends.cpu.layers import turn_keys
from vidspec_models.backends.cpu.packing import STRIP, Array, as_array
from vidspec_models.backends.cpu.segments import COLUMNS, FIRST, KEPT, NUM_ROWS, START, described, note_columns
from vidspec_models.backends.cpu.step import CpuStep
from vidspec_models.backends.cpu.team import alone
from vidspec_models.decoder.decoder import QueryObserver, Segment
from vidspec_models.decoder.kv_cache import KVCache

_MAX_ROWS, _MIN_ROWS = 64, 24  # per block: intermediate results stay in a core's cache


class _Block(NamedTuple):
    """Some of a prompt's rows, processed by one thread at a time."""

    rows: Rows
    tables: Array  # [n, 2, D]
    segment: Array  # see `segments`


class CpuPrompt:
    """Uses torch's number of threads at the time of the call, shared with other computing threads of the worker; the
    remaining cores belong to another worker.
    """

    is_chunk_invariant = True

    def __init__(self, step: CpuStep) -> None:
        """Uses the weights of `step`."""
        self._step = step
        geometry, size = step.decoder.geometry, step.decoder.embedding.shape[1]
        nowhere = torch.zeros(2, 1, 1, geometry.head_dim)
        # Compiles the kernels, or loads them from the cache of an earlier start.
        self.prefill(torch.zeros(1, size), (nowhere[0], nowhere[1]), Segment(KVCache(geometry, 1), 0, 1))

    def prefill(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segment: Segment,
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_wanted: int = 1,
    ) -> Tensor:
        """As `PromptRunner.prefill`."""
        parallel_for, kernels = self._step.decoder.cores.parallel_for, self._step.weights
        rows, tables = _as_arrays(hidden, rotary)
        whole, last = described([segment]), len(kernels.mlp_norm) - 1
        for layer, blocks in self._projected(rows, tables, whole, observer):
            # The last rows attend to most and take longest, so they go first. The last layer only computes wanted rows.
            still = blocks[::-1] if layer < last else _wanted(blocks, num_wanted)
            parallel_for(partial(self._finish, layer), still)
            if layer < len(deepstack):
                rows += as_array(deepstack[layer])
        note_columns([segment], whole)
        return torch.from_numpy(rows[len(rows) - num_wanted :])

    def observe(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segment: Segment, observer: QueryObserver, num_layers: int
    ) -> None:
        """As `PromptRunner.observe`."""
        rows, tables = _as_arrays(hidden, rotary)
        for layer, blocks in self._projected(rows, tables, described([segment]), observer):
            if layer + 1 == num_layers:
                return
            self._step.decoder.cores.parallel_for(partial(self._finish, layer), blocks)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `PromptRunner.logits`."""
        return self._step.logits(hidden)

    def _projected(
        self, rows: Array, tables: Array, whole: Array, observer: QueryObserver | None
    ) -> Iterator[tuple[int, list[_Block]]]:
        """Each layer with the rows' blocks, whose keys and values are written; the caller finishes them."""
        weights, parallel_for = self._step.weights, self._step.decoder.cores.parallel_for
        line_bytes = tables.shape[2] * self._step.decoder.geometry.dtype.itemsize
        num_settled = (int(whole[0, START]) + len(rows)) // STRIP * STRIP if whole[0, COLUMNS] else 0
        blocks = [
            _Block(self._step.rows_of(rows[part]), tables[part], _segment_of(whole, part))
            for part in _parts(len(rows), torch.get_num_threads())
        ]
        for block in blocks:
            block.segment[0, KEPT] = num_settled  # set before any attention
        for layer in range(len(weights.mlp_norm)):
            parallel_for(partial(self._project, layer), blocks)
            turn_layer(whole, layer, weights.num_kv_heads, num_settled, line_bytes)
            if observer is not None:
                queries = np.concatenate([block.rows.heads[:, : weights.num_heads] for block in blocks])
                observer(layer, torch.from_numpy(queries))
            yield layer, blocks
        whole[0, KEPT] = num_settled

    def _project(self, layer: int, own: _Block) -> None:
        self._step.run(alone(), own.rows, own.tables, own.segment, range(2 * layer, 2 * layer + 1))

    def _finish(self, layer: int, own: _Block) -> None:
        self._step.run(alone(), own.rows, own.tables, own.segment, range(2 * layer + 1, 2 * layer + 2))


def _as_arrays(hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
    """Rows that the layers may change, and tables [n, 2, D] of cos and signed sin, in float32."""
    return as_array(hidden.to(torch.float32, copy=True)), as_array(torch.cat(rotary, 1))


def _parts(num_rows: int, num_threads: int) -> list[slice]:
    """Parts of about equal size, the same number for each thread if there are enough rows."""
    count = -(-num_rows // (_MAX_ROWS * num_threads)) * num_threads
    count = max(1, min(count, num_rows // _MIN_ROWS))
    return [slice(*edges) for edges in pairwise(num_rows * number // count for number in range(count + 1))]


def _segment_of(whole: Array, part: slice) -> Array:
    """The segment of a part's rows."""
    own = whole.copy()
    own[0, FIRST], own[0, NUM_ROWS], own[0, START] = 0, part.stop - part.start, whole[0, START] + part.start
    return own


def _wanted(blocks: Sequence[_Block], num_wanted: int) -> list[_Block]:
    """The last `num_wanted` rows, as parts of their blocks."""
    found = []
    for block in reversed(blocks):
        count = min(num_wanted, len(block.tables))
        num_wanted -= count
        if count:
            first = len(block.tables) - count
            rows = Rows(*(array[first:] for array in block.rows))
            own = _segment_of(block.segment, slice(first, len(block.tables)))
            found.append(_Block(rows, block.tables[first:], own))
    return found


@compiled
def turn_layer(segments: Array, layer: int, num_kv_heads: int, num_settled: int, line_bytes: int) -> None:
    """Also store a layer's keys transposed, up to `num_settled` rows: see `turn_keys`."""
    if num_settled:
        for kv in range(num_kv_heads):
            turn_keys(segments[0], layer * num_kv_heads + kv, num_settled, line_bytes)
