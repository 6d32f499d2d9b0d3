"""Register tiles: rows times a strip of 32 columns, query heads times a key, exponentials, the gated activation.

Each sum is one chain of fused multiply-adds in ascending order, whatever the number of rows in the tile: that makes
a step row-invariant by construction, where libraries choose their order by shape.

Operands are addresses as integers and strides in elements, so that a tile works on any slice of any array. Arrays
named `like` are there for their type only: float32, uint16 (a bfloat16) or uint32 (two bfloat16 of a strip's row).
"""

from __future__ import annotations

import math
from typing import Any

from numba import types
from numba.extending import intrinsic

from vidspec_models.cpu_kernels.vectors import LANES, Emitter, index, splat

STRIP = 2 * LANES  # columns of a strip
TILE = 4  # query lines and keys of `dot_tiles`
MAX_ROWS = 12  # rows of a tile: 24 accumulators, of the 32 registers that AVX-512 has
_LINE = 64  # bytes
_AHEAD = 64 * _LINE  # far enough for the memory to answer, and past the page at which a processor's own guess ends


@intrinsic
def strip_tile(
    _typing: Any, x_like: Any, w_like: Any, rows: Any, x: Any, x_stride: Any, w: Any, w_stride: Any,
    out: Any, out_stride: Any, count: Any,
) -> Any:  # fmt: skip
    """out[r, :32] += sum over k < count of x[r, k] * w[k, :32] for r < rows <= MAX_ROWS; out is float32.

    By the types of x and w:

    * float32 with float32, or with bfloat16 in order: as written;
    * float32 with uint32: words of two bfloat16, columns c and c + 16;
    * bfloat16 with bfloat16: k counts pairs; x[r, k] and each of w[k, :32] are two numbers, multiplied one by one.
    """
    is_paired = x_like.dtype == types.uint16
    is_ordered = w_like.dtype == types.uint16 and not is_paired
    is_halved = w_like.dtype == types.uint32
    num_lines = 1 if is_ordered or is_halved else 2  # of a strip's row
    x_bytes, w_bytes = (like.dtype.bitwidth // 8 for like in (x_like, w_like))

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, rows, x, x_stride, w, w_stride, out, out_stride, count = arguments
        emitter = Emitter(builder)
        halves = range(0, STRIP, LANES)
        multiplied = emitter.dot_pairs if is_paired else emitter.fma

        def emit(num_rows: int) -> None:
            lines = [emitter.address(x, index(r), x_stride, x_bytes) for r in range(num_rows)]
            outs = [emitter.address(out, index(r), out_stride, 4) for r in range(num_rows)]
            places = [emitter.beyond(line, half * 4) for line in outs for half in halves]

            def body(k: Any, sums: list[Any]) -> list[Any]:
                row_of_w = emitter.address(w, k, w_stride, w_bytes)
                lines_of_w = [emitter.beyond(row_of_w, i * _LINE) for i in range(num_lines)]
                for place in lines_of_w:
                    emitter.prefetch(emitter.beyond(place, _AHEAD))
                if is_halved:
                    columns = emitter.load_halves(row_of_w)
                else:
                    columns = emitter.load_row(row_of_w) if is_ordered else [*map(emitter.load, lines_of_w)]
                factors = [emitter.load_spread(emitter.address(line, k, index(1), 4)) for line in lines]
                pairs = [(factor, column) for factor in factors for column in columns]
                return [multiplied(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

            sums = emitter.loop(count, [emitter.load(place) for place in places], body)
            for place, total in zip(places, sums, strict=True):
                emitter.store(total, place)

        emitter.select_rows(rows, MAX_ROWS, emit)
        return context.get_dummy_value()

    return types.none(x_like, w_like, rows, x, x_stride, w, w_stride, out, out_stride, count), generate


@intrinsic
def dot_tiles(
    _typing: Any, like: Any, tiles: Any, queries: Any, keys: Any, num_keys: Any, out: Any, out_stride: Any, count: Any
) -> Any:  # fmt: skip
    """out[r, j] = queries[r] . keys[j] for r < 4 * tiles and j < num_keys; out is float32.

    Queries and keys are lines of count times 16 float32, or 32 bfloat16, as `like` says.

    Four by four, whose sums are then made together; out[r] is written up to the next multiple of four.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, tiles, queries, keys, num_keys, out, out_stride, count = arguments
        emitter = Emitter(builder)
        multiplied = emitter.dot_pairs if like.dtype == types.uint16 else emitter.fma
        last = builder.sub(num_keys, index(1))

        def four_keys(block: Any, _: list[Any]) -> list[Any]:
            first_key = builder.mul(block, index(TILE))
            numbers = [emitter.smaller_index(builder.add(first_key, index(i)), last) for i in range(TILE)]
            places = [emitter.address(keys, builder.mul(number, count), index(LANES), 4) for number in numbers]

            def ask(k: Any, _: list[Any]) -> list[Any]:
                for place in places:
                    emitter.prefetch(emitter.beyond(emitter.address(place, k, index(LANES), 4), _AHEAD))
                return []

            def four_queries(tile: Any, _: list[Any]) -> list[Any]:
                first = builder.mul(tile, index(TILE))
                rows = [builder.add(first, index(r)) for r in range(TILE)]
                lines = [emitter.address(queries, builder.mul(row, count), index(LANES), 4) for row in rows]

                def body(k: Any, sums: list[Any]) -> list[Any]:
                    parts, others = (
                        [emitter.load(emitter.address(line, k, index(LANES), 4)) for line in group]
                        for group in (lines, places)
                    )
                    pairs = [(query, key) for query in parts for key in others]
                    return [multiplied(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

                totals = emitter.totals(emitter.loop(count, [splat(0.0)] * TILE**2, body))
                for r, row in enumerate(rows):
                    line = emitter.address(out, row, out_stride, 4)
                    emitter.store(emitter.quarter(totals, r), emitter.address(line, first_key, index(1), 4))
                return []

            emitter.loop(count, [], ask)
            emitter.loop(tiles, [], four_queries)
            return []

        blocks = builder.sdiv(builder.add(num_keys, index(TILE - 1)), index(TILE))
        emitter.loop(blocks, [], four_keys)
        return context.get_dummy_value()

    return types.none(like, tiles, queries, keys, num_keys, out, out_stride, count), generate


@intrinsic
def largest(_typing: Any, numbers: Any, count: Any) -> Any:
    """Of count * 16 float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers, count = arguments
        emitter = Emitter(builder)

        def body(k: Any, most: list[Any]) -> list[Any]:
            return [emitter.larger(most[0], emitter.load(emitter.address(numbers, k, index(LANES), 4)))]

        return emitter.largest(emitter.loop(count, [splat(-math.inf)], body)[0])

    return types.float32(numbers, count), generate


@intrinsic
def exponentials(_typing: Any, numbers: Any, scale: Any, shift: Any, count: Any) -> Any:
    """In place exp(scale * x - shift) over count * 16 float32; returns their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers, scale, shift, count = arguments
        emitter = Emitter(builder)
        factor, most = emitter.spread(scale), emitter.spread(shift)

        def body(k: Any, sums: list[Any]) -> list[Any]:
            place = emitter.address(numbers, k, index(LANES), 4)
            value = emitter.exp(builder.fsub(builder.fmul(emitter.load(place), factor), most))
            emitter.store(value, place)
            return [builder.fadd(sums[0], value)]

        return emitter.total(emitter.loop(count, [splat(0.0)], body)[0])

    return types.float32(numbers, types.float32, types.float32, count), generate


@intrinsic
def gated(_typing: Any, gate: Any, up: Any, count: Any) -> Any:
    """In place gate = silu(gate) * up over count * 16 float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        gate, up, count = arguments
        emitter = Emitter(builder)

        def body(k: Any, _: list[Any]) -> list[Any]:
            place = emitter.address(gate, k, index(LANES), 4)
            value = emitter.load(place)
            decay = emitter.exp(builder.fsub(splat(0.0), value))
            activated = builder.fdiv(value, builder.fadd(splat(1.0), decay))
            emitter.store(builder.fmul(activated, emitter.load(emitter.address(up, k, index(LANES), 4))), place)
            return []

        emitter.loop(count, [], body)
        return context.get_dummy_value()

    return types.none(gate, up, count), generate


@intrinsic
def sum_of_squares(_typing: Any, numbers: Any, count: Any) -> Any:
    """Of count * 16 float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers, count = arguments
        emitter = Emitter(builder)

        def body(k: Any, sums: list[Any]) -> list[Any]:
            part = emitter.load(emitter.address(numbers, k, index(LANES), 4))
            return [emitter.fma(part, part, sums[0])]

        return emitter.total(emitter.loop(count, [splat(0.0)], body)[0])

    return types.float32(numbers, count), generate


@intrinsic
def copy_line(_typing: Any, like: Any, source: Any, target: Any, count: Any) -> Any:
    """Copy count * 16 float32, to bfloat16 if `like` says so."""
    is_rounded = like.dtype == types.uint16

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, source, target, count = arguments
        emitter = Emitter(builder)

        def body(k: Any, _: list[Any]) -> list[Any]:
            value = emitter.load(emitter.address(source, k, index(LANES), 4))
            kept = emitter.rounded(value) if is_rounded else value
            emitter.store(kept, emitter.address(target, k, index(LANES), 2 if is_rounded else 4))
            return []

        emitter.loop(count, [], body)
        return context.get_dummy_value()

    return types.none(like, source, target, count), generate
