"""CudaStep: a decoding step on CUDA as one captured graph per shape: one copy in, one launch, no wait.

A step with torch's operators is some 400 launches, which take longer than a small model's arithmetic. A graph captured
per shape is a single launch. There are few shapes by construction (see `batch`), and every forward of a shape runs the
same kernels, so a row's bits do not depend on the other rows. Prefill, with hundreds of rows, stays with the decoder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from vidspec_models.backends.cuda.batch import (
    BLOCK_BUCKETS,
    ROW_BUCKETS,
    StepInputs,
    bucket,
    forwards,
    num_inputs,
)
from vidspec_models.backends.cuda.kernels import CudaKernels, launch_options
from vidspec_models.backends.cuda.products import CudaProducts
from vidspec_models.backends.cuda.sampler import CudaSampler
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache

MAX_AHEAD = 16  # most successive tokens before the host sees them
_PROBE_CONTEXT, _PROBE_ROWS = 500, (20, 40)  # crosses the edge of a tile; more rows than each smaller bucket
_WARM_UPS = 2  # runs before a capture, to compile kernels and set up the libraries' workspaces

_Result = TypeVar("_Result")


class CudaStep:
    """Keeps static buffers: each call overwrites the logits of the previous one."""

    def __init__(self, decoder: Decoder, row_buckets: Sequence[int] = ROW_BUCKETS, *, is_captured: bool = True) -> None:
        """`is_captured` False launches the same kernels one by one; raises RuntimeError if they do not compile."""
        self._decoder = decoder
        self._weights = decoder.weights
        assert decoder.weights.head is not None
        self._head = decoder.weights.head.weight
        self._buckets = tuple(row_buckets)
        device, most = decoder.embedding.device, self._buckets[-1]
        options = launch_options(device)
        heads = decoder.num_heads, decoder.geometry.num_kv_heads, decoder.geometry.head_dim
        self._kernels = CudaKernels(*heads, decoder.scale, options)
        self._products = CudaProducts(device, options)
        self._staging = torch.zeros(num_inputs(most), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._staged = StepInputs.of(self._staging.numpy(), most)
        self._inputs = self._staging.to(device)
        self._ids, self._positions, self._rows, self._blocks, self._state = StepInputs.of(self._inputs, most)
        self._copied: torch.cuda.Event | None = None
        self._sampler = CudaSampler(MAX_AHEAD, self._head.shape[0], device, options)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._next_token: Callable[[], None] = self._walk_and_sample
        if is_captured:
            self._capture_all()

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at rotary `positions`, rows in the order of the segments.

        Writes every row's keys and values; the caller advances the caches' lengths. The decoder computes segments whose
        caches have hidden rows.
        """
        if any(segment.cache.hidden is not None for segment in segments):
            return self._one_by_one(ids, positions, segments)
        found, row = [], 0
        for blocks in forwards(segments, self._kernels.rows_per_block, self._buckets[-1]):
            stop = row + sum(block.num_rows for block in blocks)
            self._send(blocks, ids[row:stop], positions[row:stop])
            logits = self._forward(stop - row, len(blocks))
            found.append(logits if stop == len(ids) else logits.clone())  # the next forward overwrites it
            row = stop
        return found[0] if len(found) == 1 else torch.cat(found)

    def _one_by_one(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """For batches with hidden rows in some caches: a segment's path, so its bits, must not depend on the others."""
        found, row = [], 0
        for segment in segments:
            rows = slice(row, row + segment.num_rows)
            walk = self if segment.cache.hidden is None else self._decoder.step
            found.append(walk(ids[rows], positions[rows], [segment]).clone())  # the next call overwrites it
            row += segment.num_rows
        return torch.cat(found)

    @torch.inference_mode()
    def run_ahead(
        self,
        ids: Sequence[int],
        position: int,
        segment: Segment,
        noise: Tensor,
        inverse_temperature: float,
        *,
        longest_s: float | None = None,
    ) -> tuple[list[int], list[float]]:
        """Like `CpuStep.run_ahead`, with at most MAX_AHEAD tokens; ignores `longest_s`: a GPU has no cores to lose."""
        count, most = min(len(noise), MAX_AHEAD), min(self._buckets[0], self._kernels.rows_per_block)
        first = max(len(ids) - most, 0)
        if first:
            self(ids[:first], range(position, position + first), [replace(segment, num_rows=first)])
        last = Segment(segment.cache, segment.start + first, len(ids) - first)
        self._sampler.begin(noise[:count], inverse_temperature)
        self._send([last], ids[first:], range(position + first, position + len(ids)))
        for _ in range(count):
            self._next_token()
        return self._sampler.found(count)

    def use_when_alone(self, most: int) -> None:
        """Does nothing: steps on a GPU use no threads."""

    @torch.inference_mode()
    def measure_invariance(self) -> bool:
        """Measure on a scratch cache whether rows computed together have the bits that they have alone."""
        ids = list(range(_PROBE_ROWS[-1]))
        cache = KVCache(self._decoder.geometry, _PROBE_CONTEXT + len(ids))
        cache.keys.normal_()
        cache.values.normal_()
        positions = [_PROBE_CONTEXT + i for i in ids]
        alone = torch.cat(
            [self([i], [at], [Segment(cache, at, 1)]).clone() for i, at in zip(ids, positions, strict=True)]
        )
        return all(
            torch.equal(self(ids[:count], positions[:count], [Segment(cache, _PROBE_CONTEXT, count)]), alone[:count])
            for count in _PROBE_ROWS
        )

    def _send(self, blocks: Sequence[Segment], ids: Sequence[int], positions: Sequence[int]) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the last copy from the staging memory; usually over long ago
        self._staged.fill(blocks, ids, positions)
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
        """Run the model on the static inputs; logits [num_rows, V]."""
        weights, kernels, products, eps = self._weights, self._kernels, self._products, self._weights.eps
        rows, blocks = self._rows[:num_rows], self._blocks[:num_blocks]
        rotary = weights.rotary_tables, self._positions[:num_rows]
        hidden = weights.embedding.index_select(0, self._ids[:num_rows])
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        normed = products.add_and_norm(hidden, None, norms[0], eps)
        for index, layer in enumerate(weights.layers):
            parts = products.parts(normed, layer.qkv.weight)
            norm = layer.query_key_norm, eps
            queries = kernels.rotate_and_store(parts, layer.qkv_bias, rotary, rows, norm, index)
            parts = products.parts(kernels.attend(queries, blocks, index), layer.output.weight)
            normed = products.add_and_norm(hidden, parts, layer.mlp_norm, eps)
            parts = products.parts(products.gated(normed, layer.gate_up.weight), layer.down.weight)
            normed = products.add_and_norm(hidden, parts, norms[index + 1], eps)
        return products.whole(normed, self._head)

    def _walk_and_sample(self) -> None:
        """A step of one request's few rows; then the chosen token's step becomes the input for the next call."""
        logits = self._walk(self._buckets[0], BLOCK_BUCKETS[0])
        rows = slice(len(logits))
        self._sampler.sample(
            logits, self._ids[rows], self._positions[rows], self._rows[rows], self._blocks, self._state
        )

    def _capture_all(self) -> None:
        """Capture all shapes at load, while no other thread uses the device; graphs share one memory pool."""
        pool = torch.cuda.graph_pool_handle()
        for shape in itertools.product(reversed(self._buckets), reversed(BLOCK_BUCKETS)):
            self._graphs[shape] = self._captured(partial(self._walk, *shape), pool)
        self._next_token = self._captured(self._walk_and_sample, pool)[0].replay

    @torch.inference_mode()
    def _captured(self, work: Callable[[], _Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """A graph of `work`, and what `work` returned: the tensors that replays write their results to."""
        with torch.cuda.device(self._inputs.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._inputs.zero_()
                    self._rows[:, -1] = -1  # writes nowhere
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = work()
        return graph, result
