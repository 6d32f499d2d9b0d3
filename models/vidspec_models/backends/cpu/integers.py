"""Products of integers: weights of 8 bits, rows of 16, both with a scale for each block of 64 (see `integer_weights`).

Memory is what a step of few rows waits for, and such weights are half as many bytes as bfloat16. Within a block sums
are exact, and blocks are added one after the other, so a row's bits do not depend on the rows beside it. Rows keep more
digits than a bfloat16 has: 64 products of 8 and 16 bits fit 32 bits, so nothing is gained by fewer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from vidspec_models.backends.cpu.layers import FLOAT, compiled
from vidspec_models.backends.cpu.packing import BLOCK_BYTES, LANES, RECORD_BYTES, STRIP, Array
from vidspec_models.backends.cpu.tiles import MAX_ROWS, WHOLE_ROWS, prefetch_ahead
from vidspec_models.backends.cpu.vectors import Emitter, index, splat_int
from vidspec_models.decoder.integer_weights import BLOCK

_PAIRS = BLOCK // 2  # of rows of a block, multiplied and added at once
_PAIR_BYTES = 2 * STRIP
_LARGEST = 32767.0
_HAS_AVX512 = bool(torch.cpu._is_avx512_supported())
_MOST_LANES = 16 if _HAS_AVX512 else 8 if torch.cpu._is_avx2_supported() else 0  # that one instruction multiplies
# Asked of x86 only: LLVM does not know every processor's features.
_HAS_VNNI = _MOST_LANES > 0 and bool(binding.get_host_cpu_features().get("avx512vnni" if _HAS_AVX512 else "avxvnni"))


@compiled
def integer_product(x: Array, strips: Array, out: Array, begin: int, end: int) -> None:
    """As `strip_product`, with strips [N / 32, K / 64, RECORD_BYTES]."""
    num_rows, blocks = x.shape[0], strips.shape[1]
    numbers, scales = np.empty(x.shape, np.int16), np.empty((num_rows, blocks), np.float32)
    for row in range(num_rows):
        to_integers(x[row].ctypes.data, blocks, numbers[row].ctypes.data, scales[row].ctypes.data)
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    x_stride, out_stride = x.shape[1], out.shape[1]
    for strip in range(begin, end):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines, factors = numbers[first].ctypes.data, scales[first].ctypes.data
            place = out.ctypes.data + (first * out_stride + strip * STRIP) * FLOAT
            integer_tile(last - first, lines, x_stride, factors, weights, blocks, place, out_stride)
            first = last


@intrinsic
def to_integers(_typing: Any, x: Any, blocks: Any, out: Any, scales: Any) -> Any:
    """Blocks of 64 float32 as int16, each block's largest as 32767; what that one stands for goes to scales[block]."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, blocks, out, scales = arguments
        emitter = Emitter(builder)

        def body(block: Any, _: list[Any]) -> list[Any]:
            start = builder.mul(block, index(BLOCK))
            vectors = [
                emitter.load(emitter.beyond(emitter.address(x, start, index(1), 4), 4 * lane))
                for lane in range(0, BLOCK, LANES)
            ]
            most = emitter.magnitude(vectors[0])
            for vector in vectors[1:]:
                most = emitter.larger(most, emitter.magnitude(vector))
            scale = builder.fmul(emitter.largest(most), ir.Constant(ir.FloatType(), 1 / _LARGEST))
            builder.store(scale, builder.inttoptr(emitter.address(scales, block, index(1), 4), scale.type.as_pointer()))
            is_something = builder.fcmp_ordered(">", scale, ir.Constant(scale.type, 1e-37))
            one = ir.Constant(scale.type, 1.0)
            factor = emitter.spread(builder.fdiv(one, builder.select(is_something, scale, one)))
            for lane, vector in zip(range(0, BLOCK, LANES), vectors, strict=True):
                numbers = emitter.nearest_shorts(builder.fmul(vector, factor))
                emitter.store(numbers, emitter.beyond(emitter.address(out, start, index(1), 2), 2 * lane))
            return []

        emitter.loop(blocks, [], body)
        return context.get_dummy_value()

    return types.none(x, blocks, out, scales), generate


@intrinsic
def integer_tile(
    _typing: Any, rows: Any, x: Any, x_stride: Any, scales: Any, records: Any, blocks: Any, out: Any, out_stride: Any
) -> Any:  # fmt: skip
    """out[r, :32] += the products of x[r] with a strip for r < rows <= MAX_ROWS; see `to_integers` for x and scales."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, x, x_stride, scales, records, blocks, out, out_stride = arguments
        emitter = Emitter(builder)

        def emit(num_rows: int) -> None:
            lines = [emitter.address(x, index(r), x_stride, 2) for r in range(num_rows)]
            factors = [emitter.address(scales, index(r), blocks, 4) for r in range(num_rows)]
            outs = [emitter.address(out, index(r), out_stride, 4) for r in range(num_rows)]
            lanes = LANES if num_rows <= WHOLE_ROWS else LANES // 2

            def body(block: Any, _: list[Any]) -> list[Any]:
                record = emitter.address(records, block, index(RECORD_BYTES), 1)
                here = [emitter.address(line, block, index(BLOCK), 2) for line in lines]
                of_block = [emitter.load_spread(emitter.address(line, block, index(1), 4), lanes) for line in factors]
                for first in range(0, STRIP, 2 * lanes):
                    columns = (first, first + lanes)
                    sums = _block_sums(emitter, record, here, columns, lanes)
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

    return types.none(rows, x, x_stride, scales, records, blocks, out, out_stride), generate


def _block_sums(emitter: Emitter, record: Any, lines: list[Any], columns: tuple[int, int], lanes: int) -> list[Any]:
    """Sums of one block, in integers: for each line the vector of the first columns, then that of the second."""

    def added(factor: Any, weights: Any, before: Any) -> Any:
        if _HAS_VNNI:
            return emitter.add_pairs(factor, weights, before, _MOST_LANES)
        if _MOST_LANES:
            return emitter.builder.add(before, emitter.multiply_pairs_x86(factor, weights, _MOST_LANES))
        return emitter.builder.add(before, emitter.multiply_pairs(factor, weights))

    def body(pair: Any, sums: list[Any]) -> list[Any]:
        row = emitter.address(record, pair, index(_PAIR_BYTES), 1)
        if columns[0] == 0:
            prefetch_ahead(emitter, row)
        both = [emitter.load_bytes(emitter.beyond(row, 2 * column), 2 * lanes) for column in columns]
        factors = [emitter.load_spread_pair(emitter.address(line, pair, index(2), 2), lanes) for line in lines]
        pairs = [(factor, weights) for factor in factors for weights in both]
        return [added(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

    return emitter.loop(index(_PAIRS), [splat_int(0, lanes) for _ in range(2 * len(lines))], body)
