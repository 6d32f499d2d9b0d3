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
# Rows of a strip with weights of eight bits whose products one instruction adds up. With 4, the rows that weights are
# multiplied with are int8 in memory, too, and weights are unsigned, larger by `EXCESS` than their value; with 2, these
# rows are int16 in memory. Weights of four bits are always multiplied 4 at a time: sums of their products fit 16 bits.
TOGETHER = 4 if _HAS_VNNI else 2
SMALL_ROWS = FEWER_ROWS if _HAS_AVX512 else 5  # of a tile with weights of four bits, whose loop needs more registers


class Int8Rows(NamedTuple):
    """Rows [n, K] in the layout of `int8_tile`, one tile after the other; see `quantise_row`."""

    num_rows: int
    words: Array  # int32 [n * K / together]
    scales: Array  # [n * K / 64]
    starts: Array  # int32 [n * K / 64]


@emitted(types.int64)
def together(_: Emitter, strips: Any) -> Any:
    """How many products with these strips an instruction adds up."""
    return index(_together(strips))


def _together(strips: Any) -> int:
    return 4 if strips == types.uint8 else TOGETHER


@emitted(types.int64)
def most_rows(_: Emitter, strips: Any) -> Any:
    """Rows of a tile with these strips."""
    return index(_most_rows(strips))


def _most_rows(strips: Any) -> int:
    return SMALL_ROWS if strips == types.uint8 else FEWER_ROWS


@compiled
def quantise_rows(x: Array, strips: Array) -> Int8Rows:
    """Convert rows x [n, K] to integers that these strips are multiplied with."""
    num_rows, blocks, count = x.shape[0], x.shape[1] // BLOCK, together(strips)
    words = np.empty(num_rows * x.shape[1] // count, np.int32)
    scales, starts = np.empty(num_rows * blocks, np.float32), np.empty(num_rows * blocks, np.int32)
    num_tiles = (num_rows - 1) // most_rows(strips) + 1
    first = 0
    for tile in range(num_tiles):
        last = num_rows * (tile + 1) // num_tiles
        for row in range(first, last):
            quantise_row(
                x[row].ctypes.data, blocks, last - first,
                words[first * x.shape[1] // count + (row - first) * (BLOCK // count) :].ctypes.data,
                scales[first * blocks + row - first :].ctypes.data, starts[first * blocks + row - first :].ctypes.data,
                strips,
            )  # fmt: skip
        first = last
    return Int8Rows(num_rows, words, scales, starts)


@compiled
def int8_product(x: Int8Rows, strips: Array, out: Array, begin: int, end: int) -> None:
    """Like `strip_product`, with strips [N / 32, K / 64, record], of type int8 or, with numbers of four bits, uint8."""
    num_rows, blocks = x.num_rows, strips.shape[1]
    num_tiles = (num_rows - 1) // most_rows(strips) + 1
    for strip in range(begin, end):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines = x.words[first * blocks * (BLOCK // together(strips)) :].ctypes.data
            scales, starts = x.scales[first * blocks :].ctypes.data, x.starts[first * blocks :].ctypes.data
            place = out[first, strip * STRIP :].ctypes.data
            int8_tile(last - first, lines, scales, starts, weights, blocks, place, out.shape[1], strips)
            first = last


@emitted()
def quantise_row(
    emitter: Emitter, x: Any, blocks: Any, rows: Any, out: Any, scales: Any, starts: Any, strips: Any
) -> None:
    """Convert a row's blocks of 64 float32 to integers, with each block's largest number as 127. A block's scale is the
    value of one unit; its start is the initial sum that cancels the `EXCESS` of unsigned weights.

    In memory the first blocks of all of a tile's rows come first, then their second blocks; scales and starts likewise.
    `out`, `scales` and `starts` are this row's first places.
    """
    builder, count = emitter.builder, _together(strips)

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
            place = emitter.beyond(emitter.address(out, block, rows, _row_bytes(count)), lane * 4 // count)
            emitter.store(emitter.shortened(numbers, 4 // count), place)
        if count == 4:
            excess = builder.mul(emitter.sum_of_integers(total), ir.Constant(I32, -EXCESS))
            emitter.store(excess, emitter.address(starts, block, rows, 4))
        return []

    emitter.loop(blocks, [], body)


@emitted()
def int8_tile(
    emitter: Emitter, rows: Any, words: Any, scales: Any, starts: Any, records: Any, blocks: Any, out: Any,
    out_stride: Any, strips: Any,
) -> None:  # fmt: skip
    """out[r, :32] += the products of row r with a strip for r < rows <= most_rows; rows come from `quantise_row`.

    Records are those of `small_records` if the strips' type is uint8, else of `int8_records`.
    """
    is_small, count = strips == types.uint8, _together(strips)
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
            here = emitter.address(words, block, index(num_rows * _row_bytes(count)), 1)
            before = of_rows(starts, I32) if count == 4 else [splat_int(0, lanes)] * num_rows
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

    emitter.select_rows(rows, _most_rows(strips), emit)


def _row_bytes(count: int) -> int:
    """Bytes of a row's block of integers, of which so many are in a word."""
    return BLOCK * 4 // count


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
        rows = range(len(before))
        factors = [emitter.load_spread(emitter.beyond(here, _row_bytes(TOGETHER) * r), lanes, I32) for r in rows]
        pairs = [(factor, weights) for factor in factors for weights in both]
        return [added(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

    return emitter.loop(index(BLOCK // TOGETHER), [start for start in before for _ in columns], body)


def _small_block_sums(
    emitter: Emitter, record: Any, words: Any, columns: tuple[int, int], lanes: int, before: list[Any]
) -> list[Any]:
    """`_block_sums` of a record of `small_records`.

    Zeros are added to the numbers where there are registers for it, else they are multiplied with a row's sum at the
    end, which is 4 to 9 % slower for many rows with AVX-512, and a fifth faster with AVX-VNNI.
    """
    builder = emitter.builder
    mask, shift, num_steps = splat_int(0x0F0F0F0F, lanes), splat_int(SMALL_BITS, lanes), BLOCK // 4 // 2
    places = [emitter.beyond(record, BLOCK_BYTES // 2 + column) for column in columns]
    zeros = [emitter.load_bytes_as_words(place, lanes) for place in places]
    are_added = TOGETHER == 4 and _MAX_LANES == LANES
    fourfold = [builder.mul(zero, splat_int(0x01010101, lanes)) for zero in zeros]

    def added(numbers: Any, factor: Any, total: Any) -> Any:
        if TOGETHER == 4:
            return emitter.add_quads(numbers, factor, total, _MAX_LANES)
        return emitter.add_shorts(total, emitter.multiply_bytes_x86(numbers, factor, _MAX_LANES))

    def sums_of(halves: tuple[int, ...], initial: list[Any]) -> list[Any]:
        def body(step: Any, sums: list[Any]) -> list[Any]:
            row = emitter.address(record, step, index(4 * STRIP), 1)
            for line in range(0, 4 * STRIP if columns[0] == 0 and 0 in halves else 0, CACHE_LINE):
                emitter.prefetch(emitter.beyond(row, line))
            packed = [emitter.load(emitter.beyond(row, 4 * column), lanes, I32) for column in columns]
            for half in halves:
                both = [builder.and_(builder.lshr(each, shift) if half else each, mask) for each in packed]
                if are_added:  # no byte becomes larger than a byte
                    both = [builder.add(*each) for each in zip(both, fourfold, strict=True)]
                here = emitter.beyond(emitter.address(words, step, index(1), 4), 4 * half * num_steps)
                rows = range(len(before))
                factors = [emitter.load_spread(emitter.beyond(here, _row_bytes(4) * r), lanes, I32) for r in rows]
                pairs = [(numbers, factor) for factor in factors for numbers in both]
                sums = [added(*pair, total) for pair, total in zip(pairs, sums, strict=True)]
            return sums

        return emitter.loop(emitter.unknown(num_steps), initial, body)

    totals = [start for start in before for _ in columns]
    if TOGETHER == 4:
        totals = sums_of((0, 1), totals)
    else:
        nothing, one = [splat_int(0, lanes)] * len(totals), splat_int(0x00010001, lanes)
        for half in (0, 1):  # whose sums fit 16 bits: 8 steps of 2 * 15 * 127 are 30,480
            of_half = [emitter.multiply_pairs_x86(sums, one, _MAX_LANES) for sums in sums_of((half,), nothing)]
            totals = [builder.add(*both) for both in zip(totals, of_half, strict=True)]
    return totals if are_added else _with_zeros(emitter, totals, zeros, before)


def _with_zeros(emitter: Emitter, totals: list[Any], zeros: list[Any], starts: list[Any]) -> list[Any]:
    """Add the products of `EXCESS` less the zeros with the sum of each row's block, which fits 16 bits.

    A row's start is -`EXCESS` times this sum.
    """
    builder = emitter.builder
    row_sums = [builder.sdiv(start, splat_int(-EXCESS, start.type.count), flags=["exact"]) for start in starts]
    products = [emitter.multiply_pairs_x86(zero, row, _MAX_LANES) for row in row_sums for zero in zeros]
    return [builder.add(*both) for both in zip(totals, products, strict=True)]
