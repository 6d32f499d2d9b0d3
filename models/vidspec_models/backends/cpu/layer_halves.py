"""A layer in two halves, for the rows of a step or of a prompt, and for one thread or a team of threads.

The first half writes every row's keys and values, so the second half may be divided into blocks of rows, which threads
share. In a team each member takes parts of every product's columns, and key/value heads with some of the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from vidspec_models.backends.cpu.int8 import int8_product, quantise_rows
from vidspec_models.backends.cpu.kernel_cache import compiled, inlined
from vidspec_models.backends.cpu.layers import (
    attend_segment,
    rms_norm,
    room_for_scores,
    rounded,
    strip_product,
    write_keys_and_values,
)
from vidspec_models.backends.cpu.packing import LANES, STRIP, Array, StepWeights
from vidspec_models.backends.cpu.segments import NUM_ROWS, START
from vidspec_models.backends.cpu.team import Member, begin_task, end_task, share, take_part
from vidspec_models.backends.cpu.tiles import clear, copy_line, gated

_INTEGERS = (types.int8, types.uint8)  # of eight bits and of four


class Rows(NamedTuple):
    """Buffers in which n rows go through a layer; shared by all members of a team."""

    hidden: Array  # [n, E]
    heads: Array  # [n, H + 2 KV, D]
    mixed: Array  # [n, H, D]
    gate_up: Array  # [n, 2 M]
    acted: Array  # [n, M]
    logits: Array  # [n, V padded], or [0, V padded] where none are wanted


def operand(x: Array, strips: Array) -> Any:
    """x [n, K] converted to the arithmetic of the strips."""
    raise NotImplementedError("compiled only")


@overload(operand)
def _operand(x: Any, strips: Any) -> Any:
    def integer(x: Any, strips: Any) -> Any:
        return quantise_rows(x, strips)

    def half(x: Any, strips: Any) -> Any:
        return rounded(x)

    def same(x: Any, strips: Any) -> Any:
        return x

    return integer if strips.dtype in _INTEGERS else half if strips.dtype == types.uint16 else same


def product(x: Any, strips: Array, out: Array, begin: int, end: int) -> None:
    """out [n, N] += an operand [n, K] times strips begin..end, in the arithmetic of the strips."""
    raise NotImplementedError("compiled only")


@overload(product)
def _product(x: Any, strips: Any, out: Any, begin: Any, end: Any) -> Any:
    def of_integers(x: Any, strips: Any, out: Any, begin: Any, end: Any) -> Any:
        int8_product(x, strips, out, begin, end)

    def of_strips(x: Any, strips: Any, out: Any, begin: Any, end: Any) -> Any:
        strip_product(x, strips, out, begin, end)

    return of_integers if strips.dtype in _INTEGERS else of_strips


@inlined
def project(
    member: Member, rows: Rows, tables: Array, segments: Array, layer: int, weights: StepWeights, queries: Array
) -> None:
    """Norm, query/key/value product and rotation by tables [n, 2, D].

    Keys and values go into the segments' caches, in the type of `queries`.
    """
    num_rows, num_strips = rows.hidden.shape[0], weights.qkv.shape[1]
    num_parts = min(member.team_size, num_strips)
    part = begin_task(member, num_parts)
    if part >= 0:
        normed = np.empty_like(rows.hidden)
        rms_norm(rows.hidden, weights.attention_norm[layer], weights.eps, normed)
        x, qkv = operand(normed, weights.qkv[layer]), rows.heads.reshape(num_rows, num_strips * STRIP)
        while part >= 0:
            begin, end = share(part, num_parts, num_strips)
            bias = weights.qkv_bias[layer, begin * STRIP :].ctypes.data
            for row in range(num_rows):
                copy_line(qkv, bias, qkv[row, begin * STRIP :].ctypes.data, (end - begin) * STRIP // LANES)
            product(x, weights.qkv[layer], qkv, begin, end)
            part = take_part(member)
    end_task(member)
    num_kv_heads = weights.num_kv_heads
    part = begin_task(member, segments.shape[0] * num_kv_heads)
    while part >= 0:
        one, kv = segments[part // num_kv_heads], part % num_kv_heads
        write_keys_and_values(rows.heads, one, layer, kv, tables, weights, queries)
        part = take_part(member)
    end_task(member)


@inlined
def finish(member: Member, rows: Rows, segments: Array, layer: int, weights: StepWeights, queries: Array) -> None:
    """Attention of the projected heads, output product and MLP, added to the rows. queries [64, D] is scratch."""
    attend_all(member, rows, segments, layer, weights, queries)
    num_rows, num_heads, width = rows.mixed.shape
    add_product(member, rows.mixed.reshape(num_rows, num_heads * width), weights.output[layer], rows.hidden)
    inner = rows.acted.shape[1]
    num_parts = min(member.team_size, inner // STRIP)
    part = begin_task(member, num_parts)
    if part >= 0:
        normed, strips = np.empty_like(rows.hidden), weights.gate_up[layer]
        rms_norm(rows.hidden, weights.mlp_norm[layer], weights.eps, normed)
        x = operand(normed, strips)
        while part >= 0:
            begin, end = share(part, num_parts, inner // STRIP)
            first, num_vectors = begin * STRIP, (end - begin) * STRIP // LANES
            for row in range(num_rows):
                clear(rows.gate_up[row, first:].ctypes.data, num_vectors)
                clear(rows.gate_up[row, inner + first :].ctypes.data, num_vectors)
            product(x, strips, rows.gate_up, begin, end)
            product(x, strips, rows.gate_up, inner // STRIP + begin, inner // STRIP + end)
            for row in range(num_rows):
                gate = rows.gate_up[row, first:].ctypes.data
                gated(gate, rows.gate_up[row, inner + first :].ctypes.data, num_vectors)
                copy_line(rows.acted, gate, rows.acted[row, first:].ctypes.data, num_vectors)
            part = take_part(member)
    end_task(member)
    add_product(member, rows.acted, weights.down[layer], rows.hidden)


@inlined
def attend_all(member: Member, rows: Rows, segments: Array, layer: int, weights: StepWeights, queries: Array) -> None:
    """Attention of all segments; each key/value head's rows are cut into enough blocks for all members to get one."""
    num_kv_heads = weights.num_kv_heads
    blocks = (member.team_size - 1) // (segments.shape[0] * num_kv_heads) + 1
    part = begin_task(member, segments.shape[0] * num_kv_heads * blocks)
    if part >= 0:
        longest = 0
        for segment in range(segments.shape[0]):
            longest = max(longest, segments[segment, START] + segments[segment, NUM_ROWS])
        scores = room_for_scores(longest)
        while part >= 0:
            one, kv, block = segments[part // blocks // num_kv_heads], part // blocks % num_kv_heads, part % blocks
            begin, end = share(block, blocks, one[NUM_ROWS])
            if begin < end:
                attend_segment(rows.heads, one, layer, kv, begin, end, weights, queries, scores, rows.mixed)
            part = take_part(member)
    end_task(member)


@compiled
def add_product(member: Member, x: Array, strips: Array, out: Array) -> None:
    """out [n, N] += x [n, K] times strips."""
    num_parts = min(member.team_size, strips.shape[0])
    part = begin_task(member, num_parts)
    if part >= 0:
        given = operand(x, strips)
        while part >= 0:
            begin, end = share(part, num_parts, strips.shape[0])
            product(given, strips, out, begin, end)
            part = take_part(member)
    end_task(member)
