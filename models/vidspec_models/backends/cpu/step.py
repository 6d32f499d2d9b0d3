"""CpuStep: a model's decoding step on a CPU through compiled kernels, all rows through all layers in one call.

Everything a row's values depend on is computed by the same chain of operations however many rows share the step.
A step of few rows reads every weight once, so its time is the weights' bytes; more rows are bound by arithmetic, and a
processor that multiplies bfloat16 does so at twice the pace. Prefill's products, with hundreds of rows, stay with
torch.

Three arithmetics, told apart by the arrays' types when a kernel is compiled. In *float32* all operands are float32. In
*bfloat16* (uint16 arrays; only where the processor multiplies it) the operands of products, queries, keys and values
are rounded to bfloat16; everything else, all sums above all, stays float32. In *int8* weights are integers, and so are
the rows that they are multiplied with; all else is as in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.backends.cpu.integers import integer_product
from vidspec_models.backends.cpu.layers import attend_segment, compiled, rms_norm, strip_product
from vidspec_models.backends.cpu.packing import (
    LANES,
    MAX_LINES,
    SEGMENT_FIELDS,
    STRIP,
    Array,
    StepWeights,
    as_array,
    step_weights,
)
from vidspec_models.backends.cpu.tiles import copy_line, gated
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache

_NUM_ROWS, _START, _COLUMNS, _KEPT = 1, 2, 8, 9  # fields of a segment


class CpuStep:
    """Weights in kernel form; keeps no state between calls, but for what caches keep.

    Scores take keys as columns, 32 rows at a time. Blocks whose rows are settled are turned once and stay with their
    cache: turning all of them took longer than reading int8 weights. Where rows are hidden they lie in another order,
    and are turned each time.
    """

    def __init__(self, language_model: Any, lm_head: Any, decoder: Decoder, *, are_integers: bool = False) -> None:
        """`are_integers` for weights that `round_weights` has rounded."""
        self._decoder = decoder
        self._embedding = as_array(decoder.embedding)
        self._tables = as_array(decoder.weights.rotary_tables)
        self._vocabulary = lm_head.weight.shape[0]
        eps = float(language_model.layers[0].input_layernorm.variance_epsilon)
        self._query_type = np.uint16 if decoder.embedding.dtype is torch.bfloat16 else np.float32
        self._weights = step_weights(language_model, lm_head, decoder.head_dim, are_integers=are_integers)
        self._constants = (decoder.num_heads, decoder.num_kv_heads, eps, decoder.scale, self._weights)
        # Compiles, or fetches what an earlier start did.
        self([0], [0], [Segment(KVCache(decoder.geometry, 1), 0, 1)])
        self.run_ahead([0], 0, Segment(KVCache(decoder.geometry, 1), 0, 1), torch.zeros(1, self._vocabulary), 1.0)

    def __call__(self, ids: Sequence[int], positions: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at rotary `positions`, rows in the order of the segments.

        Writes every row's keys and values; advancing the caches' lengths is the caller's.
        """
        table = _described(segments)
        logits = decode(
            self._embedding[list(ids)], self._tables[list(positions)], table, *self._constants, self._scratch()
        )
        _note_columns(segments, table)
        return torch.from_numpy(logits)[:, : self._vocabulary]

    def run_ahead(
        self, ids: Sequence[int], position: int, segment: Segment, noise: Tensor, sharpness: float
    ) -> tuple[list[int], list[float]]:
        """As many tokens as `noise` float32 [count, V] has rows, each after the one before, the first after `ids`.

        A token has the largest of `sharpness` times its logit plus its noise; with it comes how far the second largest
        is behind. Writes keys and values of all but the last token.
        """
        count, table = len(noise), _described([segment])
        tokens, margins = np.empty(count, np.int64), np.empty(count, np.float32)
        run_ahead(
            self._embedding[list(ids)],
            position,
            self._embedding,
            self._tables,
            table,
            *self._constants,
            self._scratch(),
            sharpness,
            noise.numpy(),
            tokens,
            margins,
        )
        _note_columns([segment], table)
        return tokens.tolist(), margins.tolist()

    def _scratch(self) -> NDArray[Any]:
        return np.empty((MAX_LINES, self._decoder.head_dim), self._query_type)


def _described(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Segments as the kernels take them, [n, SEGMENT_FIELDS]."""
    table = np.empty((len(segments), SEGMENT_FIELDS), np.int64)
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


def _note_columns(segments: Sequence[Segment], table: NDArray[np.int64]) -> None:
    for segment, kept in zip(segments, table[:, _KEPT].tolist(), strict=True):
        segment.cache.num_columns = kept


def product(x: Array, strips: Array, out: Array) -> None:
    """out [n, N] += x [n, K] times strips, in the arithmetic that those are for."""
    raise NotImplementedError("compiled only")


@overload(product)
def _product(x: Any, strips: Any, out: Any) -> Any:
    def of_integers(x: Any, strips: Any, out: Any) -> Any:
        integer_product(x, strips, out)

    def of_strips(x: Any, strips: Any, out: Any) -> Any:
        strip_product(x, strips, out)

    return of_integers if strips.dtype == types.int8 else of_strips


@compiled
def decode(
    hidden: Array, tables: Array, segments: Array, num_heads: int, num_kv_heads: int, eps: float, scale: float,
    weights: StepWeights, queries: Array,
) -> Array:  # fmt: skip
    """Logits [n, V padded] of rows hidden [n, E] (overwritten) with rotary tables [n, 2, D].

    queries [64, D] is scratch of the type that keys and values are stored in. Keys of rows before a segment's first
    become columns, where they are kept, and the segment says so afterwards.
    """
    num_rows, size = hidden.shape
    width = tables.shape[2]
    num_layers, inner = weights.mlp_norm.shape[0], weights.gate_up.shape[1] * STRIP // 2
    normed = np.empty((num_rows, size), np.float32)
    qkv = np.empty((num_rows, weights.qkv_bias.shape[1]), np.float32)
    heads = qkv.reshape(num_rows, num_heads + 2 * num_kv_heads, width)
    mixed = np.empty((num_rows, num_heads, width), np.float32)
    acted = np.empty((num_rows, inner), np.float32)
    longest = 0
    for segment in range(segments.shape[0]):
        longest = max(longest, segments[segment, 1] + segments[segment, 2])
    # One more than is seen: a row's last weight may be multiplied in a pair.
    scores = np.empty((MAX_LINES, (longest // STRIP + 1) * STRIP), np.float32)
    for layer in range(num_layers):
        rms_norm(hidden, weights.attention_norm[layer], eps, normed)
        for row in range(num_rows):
            copy_line(qkv, weights.qkv_bias[layer].ctypes.data, qkv[row].ctypes.data, qkv.shape[1] // LANES)
        product(normed, weights.qkv[layer], qkv)
        for segment in range(segments.shape[0]):
            norm, one = weights.head_norm[layer], segments[segment]
            attend_segment(heads, one, layer, num_kv_heads, norm, tables, eps, scale, queries, scores, mixed)
        product(mixed.reshape(num_rows, num_heads * width), weights.output[layer], hidden)
        rms_norm(hidden, weights.mlp_norm[layer], eps, normed)
        gate_up = np.zeros((num_rows, 2 * inner), np.float32)
        product(normed, weights.gate_up[layer], gate_up)
        for row in range(num_rows):
            gated(gate_up[row].ctypes.data, gate_up[row, inner:].ctypes.data, inner // LANES)
            copy_line(acted, gate_up[row].ctypes.data, acted[row].ctypes.data, inner // LANES)
        product(acted, weights.down[layer], hidden)
    for segment in range(segments.shape[0]):
        segments[segment, _KEPT] = segments[segment, _START] // STRIP * STRIP if segments[segment, _COLUMNS] else 0
    rms_norm(hidden, weights.final_norm, eps, normed)
    logits = np.zeros((num_rows, weights.head.shape[0] * STRIP), np.float32)
    product(normed, weights.head, logits)
    return logits


@compiled
def run_ahead(
    hidden: Array, position: int, embedding: Array, tables: Array, segment: Array, num_heads: int, num_kv_heads: int,
    eps: float, scale: float, weights: StepWeights, queries: Array, sharpness: float, noise: Array,
    tokens: Array, margins: Array,
) -> None:  # fmt: skip
    """Several steps in one call, since a small model's step takes less time than the interpreter takes to start it.

    Fills tokens [count] and margins [count] after rows hidden [n, E], of which the first is at `position`.

    A token has the largest of `sharpness` times its logit plus its noise [count, V]; its margin is how far the second
    largest is behind. segment [1, SEGMENT_FIELDS] is changed.
    """
    vocabulary = noise.shape[1]
    for i in range(len(tokens)):
        num_rows = hidden.shape[0]
        rotary = tables[position : position + num_rows]
        logits = decode(hidden, rotary, segment, num_heads, num_kv_heads, eps, scale, weights, queries)[num_rows - 1]
        best, second, chosen = -math.inf, -math.inf, 0
        for token in range(vocabulary):
            score = sharpness * logits[token] + noise[i, token]
            if score > best:
                best, second, chosen = score, best, token
            elif score > second:
                second = score
        tokens[i], margins[i] = chosen, best - second
        position += num_rows
        segment[0, _START] += num_rows
        segment[0, _NUM_ROWS] = 1
        hidden = np.copy(embedding[chosen : chosen + 1])
