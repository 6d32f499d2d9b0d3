"""A decoding step, compiled: all rows through all layers, each row against its own sequence's cache.

Everything a row's values depend on is computed by the same chain of operations however many rows share the step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from vidspec_models.cpu_kernels.tiles import (
    MAX_ROWS,
    STRIP,
    TILE,
    copy_line,
    dot_tiles,
    exponentials,
    gated,
    largest,
    strip_tile,
    sum_of_squares,
)
from vidspec_models.cpu_kernels.vectors import LANES

Array = NDArray[Any]


def _compiled(function: Any) -> Any:
    """Compiled without the interpreter's lock, and kept for the next start where there is a place to keep it."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # a read-only installation and no writable cache folder
        return njit(nogil=True)(function)


class StepWeights(NamedTuple):
    """A model of L layers for one step: H query heads, KV key/value heads of width D, hidden size E, MLP width M.

    Products come in strips (see `product`), their columns padded to whole strips: 32 float32,
    or 16 words of two bfloat16.
    """

    attention_norm: Array  # [L, E]
    qkv: Array  # [L, strips, E, 32]
    qkv_bias: Array  # [L, strips * 32]
    head_norm: Array  # [L, H + KV, D], or [L, 0, D] where heads are not normalised
    output: Array  # [L, strips, H * D, 32]
    mlp_norm: Array  # [L, E]
    gate_up: Array  # [L, strips, E, 32]
    down: Array  # [L, strips, M, 32]
    final_norm: Array  # [E]
    head: Array  # [strips, E, 32]


# Columns of a segment: first row, number of rows, cache rows before them, address of keys, of values, capacity,
# cached rows at the front that are not attended to, and from which layer on (see `HiddenRows`).
SEGMENT_FIELDS = 8
_FLOAT = 4  # bytes


@_compiled
def product(x: Array, strips: Array, out: Array) -> None:
    """out [n, N] += x [n, K] times strips [N / 32, K, 32 or 16], see `StepWeights`."""
    num_rows, inner, width = x.shape[0], strips.shape[1], strips.shape[2]
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    x_stride, out_stride = x.shape[1], out.shape[1]
    for strip in range(strips.shape[0]):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines = x.ctypes.data + first * x_stride * _FLOAT
            place = out.ctypes.data + (first * out_stride + strip * STRIP) * _FLOAT
            strip_tile(strips, last - first, lines, x_stride, weights, width, place, out_stride, inner)
            first = last


@_compiled
def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row; [n, K]."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        squares = sum_of_squares(x[row].ctypes.data, width // LANES)
        factor = np.float32(1.0 / math.sqrt(squares / width + eps))
        for column in range(width):
            out[row, column] = x[row, column] * factor * weight[column]


@_compiled
def rotate(head: Array, table: Array) -> None:
    """Rotary embedding in place: head [D], table [2, D] of cosines and signed sines (see `Decoder.rotary_from`)."""
    half = head.shape[0] // 2
    for i in range(half):
        low, high = head[i], head[i + half]
        head[i] = low * table[0, i] + high * table[1, i]
        head[i + half] = high * table[0, i + half] + low * table[1, i + half]


@_compiled
def attend(
    queries: Array, num_lines: int, group: int, keys: int, values: int, context: int, scale: float, scores: Array,
    out: Array,
) -> None:  # fmt: skip
    """Successive rows' query heads, `group` a row, of one key/value head over the cached rows; [12, D] each, n used.

    The first row sees `context` cached rows, each further one sees one more. Together they read keys and values once;
    what a row does not see weighs exactly nothing. out is overwritten, scores [12, longest context] are scratch.
    """
    width, stride = queries.shape[1], scores.shape[1]
    longest = context + (num_lines - 1) // group
    weights = scores.ctypes.data
    tiles = (num_lines + TILE - 1) // TILE
    dot_tiles(tiles, queries.ctypes.data, keys, longest, weights, stride, width // LANES)
    totals = np.empty(num_lines, np.float32)
    for line in range(num_lines):
        own = context + line // group
        padded = (own + LANES - 1) // LANES * LANES
        scores[line, own:padded] = -np.inf
        numbers = scores[line].ctypes.data
        most = np.float32(scale * largest(numbers, padded // LANES))
        totals[line] = exponentials(numbers, np.float32(scale), most, padded // LANES)
        scores[line, own:longest] = 0.0
        out[line] = 0.0
    for strip in range(width // STRIP):
        shift = strip * STRIP * _FLOAT
        strip_tile(
            queries,
            num_lines,
            scores.ctypes.data,
            stride,
            values + shift,
            width,
            out.ctypes.data + shift,
            width,
            longest,
        )
    for line in range(num_lines):
        out[line] /= totals[line]


@_compiled
def attend_segment(
    heads: Array, segment: Array, layer: int, num_kv_heads: int, head_norm: Array, tables: Array, eps: float,
    scale: float, scores: Array, mixed: Array,
) -> None:  # fmt: skip
    """Norm and turn a segment's heads [rows, H + 2 KV, D], write its keys and values, attend; mixed [rows, H, D]."""
    first, num_rows, start = segment[0], segment[1], segment[2]
    keys, values, capacity = segment[3], segment[4], segment[5]
    width = heads.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    line = width * _FLOAT
    layer_bytes = layer * num_kv_heads * capacity * line
    for row in range(first, first + num_rows):
        for head in range(num_heads + num_kv_heads):
            if head_norm.shape[0]:
                one = heads[row, head : head + 1]
                rms_norm(one, head_norm[head], eps, one)
            rotate(heads[row, head], tables[row])
        for kv in range(num_kv_heads):
            place = layer_bytes + (kv * capacity + start + row - first) * line
            copy_line(heads[row, num_heads + kv].ctypes.data, keys + place, width // LANES)
            copy_line(heads[row, num_heads + num_kv_heads + kv].ctypes.data, values + place, width // LANES)
    skipped = segment[6] if layer >= segment[7] else 0
    at_once = MAX_ROWS // group
    queries, out = np.empty((MAX_ROWS, width), np.float32), np.empty((MAX_ROWS, width), np.float32)
    for kv in range(num_kv_heads):
        place = layer_bytes + (kv * capacity + skipped) * line
        chosen = slice(kv * group, (kv + 1) * group)
        for row in range(first, first + num_rows, at_once):
            count = min(at_once, first + num_rows - row)
            for i in range(count):
                queries[i * group : (i + 1) * group] = heads[row + i, chosen]
            context = start + row - first + 1 - skipped
            attend(queries, count * group, group, keys + place, values + place, context, scale, scores, out)
            for i in range(count):
                mixed[row + i, chosen] = out[i * group : (i + 1) * group]


@_compiled
def decode(
    hidden: Array, tables: Array, segments: Array, num_heads: int, num_kv_heads: int, eps: float, scale: float,
    weights: StepWeights,
) -> Array:  # fmt: skip
    """Logits [n, V padded] of rows hidden [n, E] (overwritten) with rotary tables [n, 2, D]."""
    num_rows, size = hidden.shape
    width = tables.shape[2]
    num_layers, inner = weights.mlp_norm.shape[0], weights.down.shape[2]
    normed = np.empty((num_rows, size), np.float32)
    qkv = np.empty((num_rows, weights.qkv_bias.shape[1]), np.float32)
    heads = qkv.reshape(num_rows, num_heads + 2 * num_kv_heads, width)
    mixed = np.empty((num_rows, num_heads, width), np.float32)
    acted = np.empty((num_rows, inner), np.float32)
    longest = 0
    for segment in range(segments.shape[0]):
        longest = max(longest, segments[segment, 1] + segments[segment, 2])
    scores = np.empty((MAX_ROWS, (longest + LANES - 1) // LANES * LANES), np.float32)
    for layer in range(num_layers):
        rms_norm(hidden, weights.attention_norm[layer], eps, normed)
        for row in range(num_rows):
            copy_line(weights.qkv_bias[layer].ctypes.data, qkv[row].ctypes.data, qkv.shape[1] // LANES)
        product(normed, weights.qkv[layer], qkv)
        for segment in range(segments.shape[0]):
            norm = weights.head_norm[layer]
            attend_segment(heads, segments[segment], layer, num_kv_heads, norm, tables, eps, scale, scores, mixed)
        product(mixed.reshape(num_rows, num_heads * width), weights.output[layer], hidden)
        rms_norm(hidden, weights.mlp_norm[layer], eps, normed)
        gate_up = np.zeros((num_rows, 2 * inner), np.float32)
        product(normed, weights.gate_up[layer], gate_up)
        for row in range(num_rows):
            gated(gate_up[row].ctypes.data, gate_up[row, inner:].ctypes.data, inner // LANES)
            copy_line(gate_up[row].ctypes.data, acted[row].ctypes.data, inner // LANES)
        product(acted, weights.down[layer], hidden)
    rms_norm(hidden, weights.final_norm, eps, normed)
    logits = np.zeros((num_rows, weights.head.shape[0] * STRIP), np.float32)
    product(normed, weights.head, logits)
    return logits
