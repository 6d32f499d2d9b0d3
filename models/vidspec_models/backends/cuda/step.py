"""CudaStep: a decoding step on CUDA as one captured graph per shape: one copy in, one launch, no wait.

A step through torch's operators is some 400 launches, which take longer than a small model's arithmetic. Captured once
per shape, they are one. Shapes are few by construction (see `batch`), and every forward of a shape runs the same
kernels, which is what makes rows independent of their company. Prefill, hundreds of rows, stays with the plain walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.backends.cuda.batch import (
    BLOCK_BUCKETS,
    Piece,
    Place,
    StepTable,
    bucket,
    forwards,
    layout,
    table_size,
)
from vidspec_models.backends.cuda.kernels import CudaKernels
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache

_PROBE_CONTEXT, _PROBE_ROWS = 500, 20  # over the edge of a tile, more rows than the smaller bucket
_WARM_UPS = 2  # before a capture: kernels are compiled, libraries set up their workspaces


class CudaStep:
    """Keeps static buffers: logits of a call are overwritten by the next one."""

    def __init__(self, decoder: Decoder, row_buckets: Sequence[int], *, is_captured: bool = True) -> None:
        """`is_captured` False runs the same kernels one by one; raises RuntimeError where they do not compile."""
        self._decoder = decoder
        self._weights = decoder.weights
        self._kernels = CudaKernels(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, decoder.scale)
        self._buckets = tuple(row_buckets)
        device, most = decoder.embedding.device, self._buckets[-1]
        self._staging = torch.zeros(table_size(most), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._table = StepTable(most, self._staging.numpy())
        self._inputs = self._staging.to(device)
        self._ids, self._positions, self._rows, self._blocks = (
            self._inputs[part].view(shape) for part, shape in layout(most)
        )
        self._copied: torch.cuda.Event | None = None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if is_captured:
            self._capture_all()

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at rotary `positions`, rows in the order of the segments.

        Writes every row's keys and values; advancing the caches' lengths is the caller's. Caches with hidden rows
        are left to the plain walk.
        """
        if any(segment.cache.hidden is not None for segment in segments):
            return self._one_by_one(ids, positions, segments)
        places = [_place(segment) for segment in segments]
        counts = [segment.num_rows for segment in segments]
        found, row = [], 0
        for pieces in forwards(counts, self._kernels.rows_per_block, self._buckets[-1]):
            stop = row + sum(piece.count for piece in pieces)
            self._send(pieces, ids[row:stop], positions[row:stop], places)
            logits = self._forward(stop - row, len(pieces))
            found.append(logits if stop == len(ids) else logits.clone())  # the next forward overwrites it
            row = stop
        return found[0] if len(found) == 1 else torch.cat(found)

    def _one_by_one(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """A batch of which some have hidden rows: a segment's path, and so its bits, must not depend on the others."""
        found, row = [], 0
        for segment in segments:
            rows = slice(row, row + segment.num_rows)
            walk = self if segment.cache.hidden is None else self._decoder.step
            found.append(walk(ids[rows], positions[rows], [segment]).clone())  # the next call overwrites it
            row += segment.num_rows
        return torch.cat(found)

    @torch.inference_mode()
    def measure_invariance(self) -> bool:
        """Measured on a scratch cache: do rows scored together have the bits that they have alone?"""
        cache = KVCache(self._decoder.geometry, _PROBE_CONTEXT + _PROBE_ROWS)
        cache.keys.normal_()
        cache.values.normal_()
        ids = list(range(_PROBE_ROWS))
        positions = [_PROBE_CONTEXT + i for i in ids]
        alone = [self([ids[i]], [positions[i]], [Segment(cache, positions[i], 1)]).clone() for i in range(_PROBE_ROWS)]
        together = self(ids, positions, [Segment(cache, _PROBE_CONTEXT, _PROBE_ROWS)])
        return torch.equal(together, torch.cat(alone))

    def _send(
        self, pieces: Sequence[Piece], ids: Sequence[int], positions: Sequence[int], places: Sequence[Place]
    ) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the last copy out of the staging memory; long over, as a rule
        self._table.fill(pieces, ids, positions, places)
        self._inputs.copy_(self._staging, non_blocking=True)
        if self._inputs.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._inputs.device))

    def _forward(self, num_rows: int, num_blocks: int) -> Tensor:
        shape = bucket(num_rows, self._buckets), bucket(num_blocks, BLOCK_BUCKETS)
        if shape not in self._graphs:
            return self._walk(*shape)[:num_rows]
        graph, logits = self._graphs[shape]
        graph.replay()
        return logits[:num_rows]

    def _walk(self, num_rows: int, num_blocks: int) -> Tensor:
        """The model's arithmetic on the static inputs; logits [num_rows, V]."""
        weights, kernels = self._weights, self._kernels
        rows, blocks = self._rows[:num_rows], self._blocks[:num_blocks]
        rotary = self._weights.rotary_tables, self._positions[:num_rows]
        hidden = self._weights.embedding.index_select(0, self._ids[:num_rows])
        for index, layer in enumerate(weights.layers):
            product = layer.qkv(self._normed(hidden, layer.attention_norm), layer.qkv_bias)
            queries = kernels.rotate_and_store(product, rotary, rows, (layer.query_key_norm, layer.norm_eps), index)
            hidden = layer.output.added_to(hidden, kernels.attend(queries, blocks, index))
            gated = kernels.gate(layer.gate_up(self._normed(hidden, layer.mlp_norm)))
            hidden = layer.down.added_to(hidden, gated)
        return weights.head(self._normed(hidden, weights.final_norm))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self._weights.eps)

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """All shapes at load, when no other thread uses the device; graphs share one pool of memory."""
        pool = torch.cuda.graph_pool_handle()
        self._rows[:, -1] = -1  # writes nowhere
        for shape in itertools.product(reversed(self._buckets), reversed(BLOCK_BUCKETS)):
            with torch.cuda.device(self._inputs.device):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        self._walk(*shape)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = self._walk(*shape)
            self._graphs[shape] = graph, logits


def _place(segment: Segment) -> Place:
    cache = segment.cache
    return Place(cache.keys.data_ptr(), cache.values.data_ptr(), cache.capacity, segment.start)
