"""A layer in two halves, for the rows of a step as for those of a prompt, for one thread as for a team of them.

Between them every row's keys and values are written: what attends may be cut into blocks of rows, which threads share.
In a team each member has its share of every product's columns and of the key/value heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from vidspec_models.backends.cpu.integers import integer_product
from vidspec_models.backends.cpu.layers import (
    attend_segment,
    compiled,
    rms_norm,
    strip_product,
    write_keys_and_values,
)
from vidspec_models.backends.cpu.packing import LANES, MAX_LINES, STRIP, Array, StepWeights
from vidspec_models.backends.cpu.segments import NUM_ROWS, START
from vidspec_models.backends.cpu.team import Member, meet, share
from vidspec_models.backends.cpu.tiles import copy_line, gated


class Rows(NamedTuple):
    """What n rows go through a layer with; all of a team write to the same."""

    hidden: Array  # [n, E]
    heads: Array  # [n, H + 2 KV, D]
    mixed: Array  # [n, H, D]
    gate_up: Array  # [n, 2 M]
    acted: Array  # [n, M]


@compiled
def rows_of(hidden: Array, num_heads: int, num_kv_heads: int, width: int, weights: StepWeights) -> Rows:
    """Room for rows hidden [n, E]."""
    num_rows, inner = hidden.shape[0], weights.gate_up.shape[1] * STRIP // 2
    return Rows(
        hidden,
        np.empty((num_rows, num_heads + 2 * num_kv_heads, width), np.float32),
        np.empty((num_rows, num_heads, width), np.float32),
        np.empty((num_rows, 2 * inner), np.float32),
        np.empty((num_rows, inner), np.float32),
    )


def product(x: Array, strips: Array, out: Array, begin: int, end: int) -> None:
    """out [n, N] += x [n, K] times strips begin..end, in the arithmetic that those are for."""
    raise NotImplementedError("compiled only")


@overload(product)
def _product(x: Any, strips: Any, out: Any, begin: Any, end: Any) -> Any:
    def of_integers(x: Any, strips: Any, out: Any, begin: Any, end: Any) -> Any:
        integer_product(x, strips, out, begin, end)

    def of_strips(x: Any, strips: Any, out: Any, begin: Any, end: Any) -> Any:
        strip_product(x, strips, out, begin, end)

    return of_integers if strips.dtype == types.int8 else of_strips


@compiled
def project(
    member: Member, rows: Rows, tables: Array, segments: Array, layer: int, num_kv_heads: int, eps: float,
    weights: StepWeights, queries: Array,
) -> None:  # fmt: skip
    """Norm, query/key/value product and rotation by tables [n, 2, D].

    Keys and values go into the segments' caches, in the type of `queries`.
    """
    num_rows = rows.hidden.shape[0]
    normed = np.empty_like(rows.hidden)
    qkv = rows.heads.reshape(num_rows, rows.heads.shape[1] * rows.heads.shape[2])
    rms_norm(rows.hidden, weights.attention_norm[layer], eps, normed)
    begin, end = share(member, weights.qkv.shape[1])
    if begin < end:
        bias = weights.qkv_bias[layer, begin * STRIP :].ctypes.data
        for row in range(num_rows):
            copy_line(qkv, bias, qkv[row, begin * STRIP :].ctypes.data, (end - begin) * STRIP // LANES)
        product(normed, weights.qkv[layer], qkv, begin, end)
    meet(member)
    begin, end = share(member, num_kv_heads)
    for segment in range(segments.shape[0]):
        norm, one = weights.head_norm[layer], segments[segment]
        write_keys_and_values(rows.heads, one, layer, num_kv_heads, begin, end, norm, tables, eps, queries)


@compiled
def finish(
    member: Member, rows: Rows, segments: Array, layer: int, num_kv_heads: int, eps: float, scale: float,
    weights: StepWeights, queries: Array,
) -> None:  # fmt: skip
    """Attention with projected heads, output product and MLP, added to the rows. queries [64, D]: scratch."""
    num_rows, inner = rows.acted.shape
    longest = 0
    for segment in range(segments.shape[0]):
        longest = max(longest, segments[segment, START] + segments[segment, NUM_ROWS])
    # One more than is seen: a row's last weight may be multiplied in a pair.
    scores = np.empty((MAX_LINES, (longest // STRIP + 1) * STRIP), np.float32)
    begin, end = share(member, num_kv_heads)
    for segment in range(segments.shape[0]):
        one = segments[segment]
        attend_segment(rows.heads, one, layer, num_kv_heads, begin, end, scale, queries, scores, rows.mixed)
    meet(member)
    mixed = rows.mixed.reshape(num_rows, rows.mixed.shape[1] * rows.mixed.shape[2])
    begin, end = share(member, weights.output.shape[1])
    product(mixed, weights.output[layer], rows.hidden, begin, end)
    meet(member)
    normed = np.empty_like(rows.hidden)
    rms_norm(rows.hidden, weights.mlp_norm[layer], eps, normed)
    begin, end = share(member, inner // STRIP)
    if begin < end:
        first, num_vectors, strips = begin * STRIP, (end - begin) * STRIP // LANES, weights.gate_up[layer]
        for row in range(num_rows):
            for column in range(first, end * STRIP):
                rows.gate_up[row, column] = 0
                rows.gate_up[row, inner + column] = 0
        product(normed, strips, rows.gate_up, begin, end)
        product(normed, strips, rows.gate_up, inner // STRIP + begin, inner // STRIP + end)
        for row in range(num_rows):
            gate = rows.gate_up[row, first:].ctypes.data
            gated(gate, rows.gate_up[row, inner + first :].ctypes.data, num_vectors)
            copy_line(rows.acted, gate, rows.acted[row, first:].ctypes.data, num_vectors)
    meet(member)
    begin, end = share(member, weights.down.shape[1])
    product(rows.acted, weights.down[layer], rows.hidden, begin, end)
    meet(member)
