"""Products of integers of eight bits, with a scale for each block of 64 (see `integer_weights`).

Memory is what a step of few rows waits for, and such weights are half as many bytes as bfloat16; more rows wait for
arithmetic, of which an instruction does most in eight bits. Within a block sums are exact, and blocks are added one
after the other: a row's bits depend neither on the rows beside it nor on the instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from vidspec_models.backends.cpu.layers import FLOAT, compiled
from vidspec_models.backends.cpu.packing import BLOCK_BYTES, EXCESS, LANES, RECORD_BYTES, STRIP, Array
from vidspec_models.backends.cpu.tiles import CACHE_LINE, MAX_ROWS, WHOLE_ROWS, prefetch_ahead
from vidspec_models.backends.cpu.vectors import I32, Emitter, index, splat_int
from vidspec_models.decoder.integer_weights import BLOCK, LARGEST, LEAST_SCALE

_HAS_AVX512 = bool(torch.cpu._is_avx512_supported())
_MOST_LANES = 16 if _HAS_AVX512 else 8 if torch.cpu._is_avx2_supported() else 0  # that one instruction multiplies
# Asked of x86 only: LLVM does not know every processor's features.
_HAS_VNNI = _MOST_LANES > 0 and bool(binding.get_host_cpu_features().get("avx512vnni" if _HAS_AVX512 else "avxvnni"))
# Rows of a strip whose products are added by one instruction. With four the rows have integers of eight bits in memory,
# too, and weights are unsigned, `EXCESS` more than they stand for; with two their integers lie in sixteen.
TOGETHER = 4 if _HAS_VNNI else 2
_ROW_TYPE: Any = np.int8 if _HAS_VNNI else np.int16


@compiled
def integer_product(x: Array, strips: Array, out: Array, begin: int, end: int) -> None:
    """As `strip_product`, with strips [N / 32, K / 64, RECORD_BYTES]."""
    num_rows, blocks = x.shape[0], strips.shape[1]
    numbers, scales = np.empty(x.shape, _ROW_TYPE), np.empty((num_rows, blocks), np.float32)
    starts = np.empty((num_rows, blocks), np.int32)
    for row in range(num_rows):
        to_integers(
            x[row].ctypes.data, blocks, numbers[row].ctypes.data, scales[row].ctypes.data, starts[row].ctypes.data
        )
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    x_stride, out_stride = x.shape[1], out.shape[1]
    for strip in range(begin, end):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines, factors, begins = numbers[first].ctypes.data, scales[first].ctypes.data, starts[first].ctypes.data
            place = out.ctypes.data + (first * out_stride + strip * STRIP) * FLOAT
            integer_tile(last - first, lines, x_stride, factors, begins, weights, blocks, place, out_stride)
            first = last


@intrinsic
def to_integers(_typing: Any, x: Any, blocks: Any, out: Any, scales: Any, starts: Any) -> Any:
    """Blocks of 64 float32 as integers, each block's largest as 127; what one of them stands for goes to scales[block].

    starts[block] is what takes away the excess of unsigned weights.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, blocks, out, scales, starts = arguments
        emitter, size = Emitter(builder), 4 // TOGETHER

        def body(block: Any, _: list[Any]) -> list[Any]:
            start = builder.mul(block, index(BLOCK))
            vectors = [
                emitter.load(emitter.beyond(emitter.address(x, start, index(1), 4), 4 * lane))
                for lane in range(0, BLOCK, LANES)
            ]
            most = emitter.magnitude(vectors[0])
            for vector in vectors[1:]:
                most = emitter.larger(most, emitter.magnitude(vector))
            scale = builder.fmul(emitter.largest(most), ir.Constant(ir.FloatType(), 1 / LARGEST))
            builder.store(scale, builder.inttoptr(emitter.address(scales, block, index(1), 4), scale.type.as_pointer()))
            is_something = builder.fcmp_ordered(">", scale, ir.Constant(scale.type, LEAST_SCALE))
            one = ir.Constant(scale.type, 1.0)
            factor = emitter.spread(builder.fdiv(one, builder.select(is_something, scale, one)))
            total = splat_int(0)
            for lane, vector in zip(range(0, BLOCK, LANES), vectors, strict=True):
                numbers = emitter.nearest_integers(builder.fmul(vector, factor))
                total = builder.add(total, numbers)
                place = emitter.beyond(emitter.address(out, start, index(1), size), size * lane)
                emitter.store(emitter.shortened(numbers, size), place)
            if TOGETHER == 4:
                excess = builder.mul(emitter.sum_of_integers(total), ir.Constant(I32, -EXCESS))
                place = emitter.address(starts, block, index(1), 4)
                builder.store(excess, builder.inttoptr(place, I32.as_pointer()))
            return []

        emitter.loop(blocks, [], body)
        return context.get_dummy_value()

    return types.none(x, blocks, out, scales, starts), generate


@intrinsic
def integer_tile(
    _typing: Any, rows: Any, x: Any, x_stride: Any, scales: Any, starts: Any, records: Any, blocks: Any, out: Any,
    out_stride: Any,
) -> Any:  # fmt: skip
    """out[r, :32] += the products of x[r] with a strip for r < rows <= MAX_ROWS; for the rows see `to_integers`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, x, x_stride, scales, starts, records, blocks, out, out_stride = arguments
        emitter, size = Emitter(builder), 4 // TOGETHER

        def emit(num_rows: int) -> None:
            lines = [emitter.address(x, index(r), x_stride, size) for r in range(num_rows)]
            factors = [emitter.address(scales, index(r), blocks, 4) for r in range(num_rows)]
            begins = [emitter.address(starts, index(r), blocks, 4) for r in range(num_rows)]
            outs = [emitter.address(out, index(r), out_stride, 4) for r in range(num_rows)]
            lanes = LANES if num_rows <= WHOLE_ROWS else LANES // 2

            def body(block: Any, _: list[Any]) -> list[Any]:
                record = emitter.address(records, block, index(RECORD_BYTES), 1)
                here = [emitter.address(line, block, index(BLOCK), size) for line in lines]
                of_block = [emitter.load_spread(emitter.address(line, block, index(1), 4), lanes) for line in factors]
                if TOGETHER == 4:
                    before = [emitter.load_spread(emitter.address(at, block, index(1), 4), lanes, I32) for at in begins]
                else:
                    before = [splat_int(0, lanes)] * num_rows
                for first in range(0, STRIP, 2 * lanes):
                    columns = (first, first + lanes)
                    sums = _block_sums(emitter, record, here, columns, lanes, before)
                    places = [(line, column) for line in range(num_rows) for column in columns]
                    for (line, column), total in zip(places, sums, strict=True):
                        scale = emitter.load(emitter.beyond(record, BLOCK_BYTES + 4 * column), lanes)
                        place = emitter.beyond(outs[line], 4 * column)
                        factor = builder.fmul(of_block[line], scale)
                        emitter.store(emitter.fma(emitter.as_floats(total), factor, emitter.load(place, lanes)), place)
                return []

            emitter.loop(blocks, [], body)

        emitter.select_rows(rows, MAX_ROWS, emit)
        return context.get_dummy_value()

    return types.none(rows, x, x_stride, scales, starts, records, blocks, out, out_stride), generate


def _block_sums(
    emitter: Emitter, record: Any, lines: list[Any], columns: tuple[int, int], lanes: int, before: list[Any]
) -> list[Any]:  # fmt: skip
    """Sums of one block, in integers: for each line the vector of the first columns, then that of the second."""

    def weights_of(row: Any, column: int) -> Any:
        place = emitter.beyond(row, TOGETHER * column)
        return emitter.load(place, lanes, I32) if TOGETHER == 4 else emitter.load_bytes(place, 2 * lanes)

    def added(factor: Any, weights: Any, before: Any) -> Any:
        if TOGETHER == 4:
            return emitter.add_quads(weights, factor, before, _MOST_LANES)
        if _MOST_LANES:
            return emitter.builder.add(before, emitter.multiply_pairs_x86(factor, weights, _MOST_LANES))
        return emitter.builder.add(before, emitter.multiply_pairs(factor, weights))

    def body(step: Any, sums: list[Any]) -> list[Any]:
        row = emitter.address(record, step, index(TOGETHER * STRIP), 1)
        for line in range(0, TOGETHER * STRIP if columns[0] == 0 else 0, CACHE_LINE):
            prefetch_ahead(emitter, emitter.beyond(row, line))
        both = [weights_of(row, column) for column in columns]
        factors = [emitter.load_spread(emitter.address(line, step, index(4), 1), lanes, I32) for line in lines]
        pairs = [(factor, weights) for factor in factors for weights in both]
        return [added(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

    return emitter.loop(index(BLOCK // TOGETHER), [start for start in before for _ in columns], body)
