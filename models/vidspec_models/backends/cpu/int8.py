"""Products of 8-bit integers, with a scale for each block of 64 (see `decoder.int8`).

A step of few rows is bound by memory bandwidth, and int8 weights have half the bytes of bfloat16; with more rows a step
is bound by arithmetic, and an instruction multiplies the most numbers in int8. Sums within a block are exact, and
blocks are added in order: a row's bits depend neither on other rows nor on the instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types

from vidspec_models.backends.cpu.kernel_cache import compiled
from vidspec_models.backends.cpu.packing import (
    BLOCK_BYTES,
    EXCESS,
    LANES,
    RECORD_BYTES,
    SMALL_BITS,
    SMALL_RECORD_BYTES,
    STRIP,
    Array,
)
from vidspec_models.backends.cpu.tiles import FEWER_ROWS, WHOLE_ROWS
from vidspec_models.backends.cpu.vectors import CACHE_LINE, F32, I32, Emitter, emitted, index, splat_int
from vidspec_models.decoder.int8 import BLOCK, LARGEST, MIN_SCALE

_HAS_AVX512 = bool(torch.cpu._is_avx512_supported())
_MAX_LANES = 16 if _HAS_AVX512 else 8 if torch.cpu._is_avx2_supported() else 0  # per multiply instruction
# Queried on x86 only: LLVM does not know every processor's features.
_HAS_VNNI = _MAX_LANES > 0 and bool(binding.get_host_cpu_features().get("avx512vnni" if _HAS_AVX512 else "avxvnni"))
# Rows of a strip whose products one instruction adds up. With 4, the rows that weights are multiplied with are int8 in
# memory, too, and weights are unsigned, larger by `EXCESS` than their value; with 2, these rows are int16 in memory.
TOGETHER = 4 if _HAS_VNNI else 2


class Int8Rows(NamedTuple):
    """Rows [n, K] in the layout of `int8_tile`, one tile after the other; see `quantise_row`."""

    num_rows: int
    words: Array  # int32 [n * K / TOGETHER]
    scales: Array  # [n * K / 64]
    starts: Array  # int32 [n * K / 64]


@compiled
def quantise_rows(x: Array) -> Int8Rows:
    """Convert rows x [n, K] to integers."""
    num_rows, blocks = x.shape[0], x.shape[1] // BLOCK
    words = np.empty(num_rows * x.shape[1] // TOGETHER, np.int32)
    scales, starts = np.empty(num_rows * blocks, np.float32), np.empty(num_rows * blocks, np.int32)
    num_tiles = (num_rows + FEWER_ROWS - 1) // FEWER_ROWS
    first = 0
    for tile in range(num_tiles):
        last = num_rows * (tile + 1) // num_tiles
        for row in range(first, last):
            quantise_row(
                x[row].ctypes.data, blocks, last - first,
                words[first * x.shape[1] // TOGETHER + (row - first) * (BLOCK // TOGETHER) :].ctypes.data,
                scales[first * blocks + row - first :].ctypes.data, starts[first * blocks + row - first :].ctypes.data,
            )  # fmt: skip
        first = last
    return Int8Rows(num_rows, words, scales, starts)


@compiled
def int8_product(x: Int8Rows, strips: Array, out: Array, begin: int, end: int) -> None:
    """Like `strip_product`, with strips [N / 32, K / 64, record], of type int8 or, with numbers of four bits, uint8."""
    num_rows, blocks = x.num_rows, strips.shape[1]
    num_tiles = (num_rows + FEWER_ROWS - 1) // FEWER_ROWS
    for strip in range(begin, end):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines = x.words[first * blocks * (BLOCK // TOGETHER) :].ctypes.data
            scales, starts = x.scales[first * blocks :].ctypes.data, x.starts[first * blocks :].ctypes.data
            place = out[first, strip * STRIP :].ctypes.data
            int8_tile(last - first, lines, scales, starts, weights, blocks, place, out.shape[1], strips)
            first = last


@emitted()
def quantise_row(emitter: Emitter, x: Any, blocks: Any, rows: Any, out: Any, scales: Any, starts: Any) -> None:
    """Convert a row's blocks of 64 float32 to integers, with each block's largest number as 127. A block's scale is the
    value of one unit; its start is the initial sum that cancels the `EXCESS` of unsigned weights.

    In memory the first blocks of all of a tile's rows come first, then their second blocks; scales and starts likewise.
    `out`, `scales` and `starts` are this row's first places.
    """
    builder = emitter.builder

    def body(block: Any, _: list[Any]) -> list[Any]:
        here = emitter.address(x, block, index(BLOCK), 4)
        vectors = [emitter.load(emitter.beyond(here, 4 * lane)) for lane in range(0, BLOCK, LANES)]
        most = emitter.magnitude(vectors[0])
        for vector in vectors[1:]:
            most = emitter.larger(most, emitter.magnitude(vector))
        scale = builder.fmul(emitter.largest(most), ir.Constant(ir.FloatType(), 1 / LARGEST))
        emitter.store(scale, emitter.address(scales, block, rows, 4))
        is_something = builder.fcmp_ordered(">", scale, ir.Constant(scale.type, MIN_SCALE))
        one = ir.Constant(scale.type, 1.0)
        factor = emitter.spread(builder.fdiv(one, builder.select(is_something, scale, one)))
        total = splat_int(0)
        for lane, vector in zip(range(0, BLOCK, LANES), vectors, strict=True):
            numbers = emitter.nearest_integers(builder.fmul(vector, factor))
            total = builder.add(total, numbers)
            place = emitter.beyond(emitter.address(out, block, rows, _row_bytes()), lane * 4 // TOGETHER)
            emitter.store(emitter.shortened(numbers, 4 // TOGETHER), place)
        if TOGETHER == 4:
            excess = builder.mul(emitter.sum_of_integers(total), ir.Constant(I32, -EXCESS))
            emitter.store(excess, emitter.address(starts, block, rows, 4))
        return []

    emitter.loop(blocks, [], body)


@emitted()
def int8_tile(
    emitter: Emitter, rows: Any, words: Any, scales: Any, starts: Any, records: Any, blocks: Any, out: Any,
    out_stride: Any, strips: Any,
) -> None:  # fmt: skip
    """out[r, :32] += the products of row r with a strip for r < rows <= FEWER_ROWS; rows come from `quantise_row`.

    Records are those of `small_records` if the strips' type is uint8, else of `int8_records`.
    """
    is_small = strips == types.uint8
    record_bytes = SMALL_RECORD_BYTES if is_small else RECORD_BYTES
    block_bytes, scale_place = BLOCK_BYTES >> int(is_small), record_bytes - 4 * STRIP

    def emit(num_rows: int) -> None:
        lanes = LANES if num_rows <= WHOLE_ROWS else LANES // 2
        places = [(line, column) for line in range(num_rows) for column in range(0, STRIP, lanes)]
        outs = [emitter.beyond(emitter.address(out, index(line), out_stride, 4), 4 * at) for line, at in places]

        def body(block: Any, totals: list[Any]) -> list[Any]:
            def of_rows(numbers: Any, kind: Any) -> list[Any]:
                here = emitter.address(numbers, block, index(num_rows), 4)
                return [emitter.load_spread(emitter.beyond(here, 4 * r), lanes, kind) for r in range(num_rows)]

            record = emitter.address(records, block, index(record_bytes), 1)
            for line in range(block_bytes, record_bytes, CACHE_LINE):  # the part that `_block_sums` does not prefetch
                emitter.prefetch(emitter.beyond(record, line))
            here = emitter.address(words, block, index(num_rows * _row_bytes()), 1)
            before = of_rows(starts, I32) if TOGETHER == 4 else [splat_int(0, lanes)] * num_rows
            results = dict(zip(places, totals, strict=True))
            for first in range(0, STRIP, 2 * lanes):
                columns = (first, first + lanes)
                sums = (_small_block_sums if is_small else _block_sums)(emitter, record, here, columns, lanes, before)
                factors = of_rows(scales, F32)
                for number, total in enumerate(sums):
                    line, column = number // 2, columns[number % 2]
                    scale = emitter.load(emitter.beyond(record, scale_place + 4 * column), lanes)
                    factor = emitter.builder.fmul(factors[line], scale)
                    results[line, column] = emitter.fma(emitter.as_floats(total), factor, results[line, column])
            return list(results.values())

        initial = [emitter.load(place, lanes) for place in outs]
        for place, total in zip(outs, emitter.loop(blocks, initial, body), strict=True):
            emitter.store(total, place)

    emitter.select_rows(rows, FEWER_ROWS, emit)


def _row_bytes() -> int:
    """Bytes of a row's block of integers."""
    return BLOCK * 4 // TOGETHER


def _block_sums(
    emitter: Emitter, record: Any, words: Any, columns: tuple[int, int], lanes: int, before: list[Any]
) -> list[Any]:
    """Integer sums of one block: for each line the vector of the first columns, then that of the second columns."""

    def weights_of(row: Any, column: int) -> Any:
        place = emitter.beyond(row, TOGETHER * column)
        return emitter.load(place, lanes, I32) if TOGETHER == 4 else emitter.load_bytes(place, 2 * lanes)

    def added(factor: Any, weights: Any, before: Any) -> Any:
        if TOGETHER == 4:
            return emitter.add_quads(weights, factor, before, _MAX_LANES)
        if _MAX_LANES:
            return emitter.builder.add(before, emitter.multiply_pairs_x86(factor, weights, _MAX_LANES))
        return emitter.builder.add(before, emitter.multiply_pairs(factor, weights))

    def body(step: Any, sums: list[Any]) -> list[Any]:
        row = emitter.address(record, step, index(TOGETHER * STRIP), 1)
        for line in range(0, TOGETHER * STRIP if columns[0] == 0 else 0, CACHE_LINE):
            emitter.prefetch(emitter.beyond(row, line))
        both = [weights_of(row, column) for column in columns]
        here = emitter.address(words, step, index(1), 4)
        factors = [emitter.load_spread(emitter.beyond(here, _row_bytes() * r), lanes, I32) for r in range(len(before))]
        pairs = [(factor, weights) for factor in factors for weights in both]
        return [added(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

    return emitter.loop(index(BLOCK // TOGETHER), [start for start in before for _ in columns], body)


def _small_block_sums(
    emitter: Emitter, record: Any, words: Any, columns: tuple[int, int], lanes: int, before: list[Any]
) -> list[Any]:
    """`_block_sums` of a record of `small_records`; only where one instruction adds four products."""
    places = [emitter.beyond(record, BLOCK_BYTES // 2 + column) for column in columns]
    zeros = [emitter.load_bytes_fourfold(place, lanes) for place in places]
    mask, shift = splat_int(0x0F0F0F0F, lanes), splat_int(SMALL_BITS, lanes)
    num_steps = BLOCK // TOGETHER // 2

    def body(step: Any, sums: list[Any]) -> list[Any]:
        row = emitter.address(record, step, index(TOGETHER * STRIP), 1)
        for line in range(0, TOGETHER * STRIP if columns[0] == 0 else 0, CACHE_LINE):
            emitter.prefetch(emitter.beyond(row, line))
        packed = [emitter.load(emitter.beyond(row, TOGETHER * column), lanes, I32) for column in columns]
        upper = [emitter.builder.lshr(numbers, shift) for numbers in packed]
        for first, pieces in ((0, packed), (num_steps, upper)):
            both = [
                emitter.builder.add(emitter.builder.and_(piece, mask), zero)  # no byte becomes larger than a byte
                for piece, zero in zip(pieces, zeros, strict=True)
            ]
            here = emitter.beyond(emitter.address(words, step, index(1), 4), 4 * first)
            rows = range(len(before))
            factors = [emitter.load_spread(emitter.beyond(here, _row_bytes() * r), lanes, I32) for r in rows]
            pairs = [(factor, weights) for factor in factors for weights in both]
            sums = [
                emitter.add_quads(weights, factor, total, _MAX_LANES)
                for (factor, weights), total in zip(pairs, sums, strict=True)
            ]
        return sums

    return emitter.loop(index(num_steps), [start for start in before for _ in columns], body)
