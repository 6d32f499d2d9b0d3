"""Register tiles of products (a few lines times 32 columns), and operations on single lines.

A tile multiplies lines with weights, or with a cache's keys or values. Each of its sums is one chain of fused
multiply-adds in ascending order, whatever the number of lines in the tile. That makes a step batch-invariant by
construction, while libraries choose their order by shape.

Operands are addresses as integers and strides in elements, so that a tile works on any slice of any array. Arrays
named `like` only give their type: float32, uint16 (a bfloat16) or uint32 (two bfloat16 of a strip's row).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from numba import types

from vidspec_models.backends.cpu.packing import LANES, STRIP
from vidspec_models.backends.cpu.vectors import CACHE_LINE, LOG2_E, Emitter, emitted, index, splat

_HAS_AVX512 = bool(torch.cpu._is_avx512_supported())
MAX_ROWS = 12 if _HAS_AVX512 else 6  # lines per tile: 24 sums in 32 registers of 16 lanes, or twice 12 in 16 of 8
FEWER_ROWS = min(MAX_ROWS, 10)  # lines of a tile whose registers hold more than sums: two more lines were slower
WHOLE_ROWS = 12 if _HAS_AVX512 else 2  # most lines whose sums of all 32 columns fit in registers
_Columns = Callable[[Any, int, int], list[Any]]  # (k, c, lanes) -> two vectors of step k: columns c.. and c + 16..


@emitted()
def strip_tile(
    emitter: Emitter, x_like: Any, w_like: Any, rows: Any, x: Any, x_stride: Any, w: Any, w_stride: Any,
    out: Any, out_stride: Any, count: Any,
) -> None:  # fmt: skip
    """out[r, :32] += sum over k < count of x[r, k] * w[k, :32] for r < rows <= MAX_ROWS; out is float32.

    The types of x and w select the layout:

    * float32 with float32: as written;
    * float32 with uint32: w has words of two bfloat16, of columns c and c + 16;
    * bfloat16 with bfloat16: k counts pairs; x[r, k] and each of w[k, :32] are two numbers, multiplied pairwise.
    """
    is_halved = w_like == types.uint32

    def columns(k: Any, c: int, lanes: int) -> list[Any]:
        row = emitter.address(w, k, w_stride, w_like.bitwidth // 8)
        lines = [row] if is_halved else [row, emitter.beyond(row, CACHE_LINE)]
        for line in lines if c == 0 else ():
            emitter.prefetch(line)
        places = [emitter.beyond(line, c * 4) for line in lines]
        return emitter.load_halves(places[0], lanes) if is_halved else [emitter.load(at, lanes) for at in places]

    _sum_up(emitter, x_like, rows, (x, x_stride), columns, (out, out_stride), count, is_added=True)


@emitted()
def score_tile(
    emitter: Emitter, like: Any, rows: Any, x: Any, x_stride: Any, keys: Any, out: Any, out_stride: Any, count: Any
) -> None:  # fmt: skip
    """out[r, :32] = sum over k < count of x[r, k] * keys[k, :32] for r < rows <= MAX_ROWS; out is float32.

    Keys are laid out by `transpose_lines`. x and keys are float32, or pairs of bfloat16, which k then counts.
    """

    def columns(k: Any, c: int, lanes: int) -> list[Any]:
        row = emitter.address(keys, k, index(STRIP), 4)
        return [emitter.load(emitter.beyond(row, start + c * 4), lanes) for start in (0, CACHE_LINE)]

    _sum_up(emitter, like, rows, (x, x_stride), columns, (out, out_stride), count, is_added=False)


@emitted()
def value_tile(
    emitter: Emitter, like: Any, rows: Any, x: Any, x_stride: Any, values: Any, stride: Any, out: Any, out_stride: Any,
    count: Any,
) -> None:  # fmt: skip
    """out[r, :32] = sum over k < count of x[r, k] * values[k, :32] for r < rows <= MAX_ROWS; out is float32.

    x and values are float32 or bfloat16. In bfloat16 two rows are taken at once; if count is odd, x[r, count] must be 0
    (it is multiplied with the last row).
    """
    builder, is_paired = emitter.builder, like == types.uint16
    last = builder.sub(count, index(1))
    steps = builder.sdiv(builder.add(count, index(1)), index(2)) if is_paired else count

    def columns(k: Any, c: int, lanes: int) -> list[Any]:
        if not is_paired:
            row = emitter.address(values, k, stride, 4)
            for start in (0, CACHE_LINE) if c == 0 else ():
                emitter.prefetch(emitter.beyond(row, start))
            return [emitter.load(emitter.beyond(row, start + c * 4), lanes) for start in (0, CACHE_LINE)]
        first = builder.mul(k, index(2))
        second = emitter.smaller_index(builder.add(first, index(1)), last)
        lines = [emitter.address(values, number, stride, 2) for number in (first, second)]
        for line in lines:
            emitter.prefetch(line)
        return emitter.in_pairs(*(emitter.load(line) for line in lines))

    _sum_up(emitter, like, rows, (x, x_stride), columns, (out, out_stride), steps, is_added=False)


@emitted()
def transpose_lines(emitter: Emitter, lines: Any, num_lines: Any, count: Any, out: Any) -> None:
    """Transpose: out[k, j] = lines[j, k] for j < 32 and k < 16 * count, in words of 32 bits.

    If there are fewer than 32 lines, the last one is repeated.
    """
    builder = emitter.builder
    last = builder.sub(num_lines, index(1))
    width = builder.mul(count, index(LANES))
    numbers = [emitter.smaller_index(index(j), last) for j in range(STRIP)]
    places = [emitter.address(lines, number, width, 4) for number in numbers]

    def body(block: Any, _: list[Any]) -> list[Any]:
        for half in range(0, STRIP, LANES):
            here = [emitter.vector_address(place, block) for place in places[half : half + LANES]]
            for place in here:
                emitter.prefetch(place)
            columns = emitter.transposed([emitter.load(place) for place in here])
            for i, vector in enumerate(columns):
                row = builder.add(builder.mul(block, index(LANES)), index(i))
                emitter.store(vector, emitter.beyond(emitter.address(out, row, index(STRIP), 4), half * 4))
        return []

    emitter.loop(count, [], body)


def _sum_up(
    emitter: Emitter, like: Any, rows: Any, x: tuple[Any, Any], columns: _Columns, out: tuple[Any, Any], count: Any,
    *, is_added: bool,
) -> None:  # fmt: skip
    """The code of a tile, emitted for each number of rows: words of x are broadcast and multiplied with the columns.

    With more than `WHOLE_ROWS` lines, registers are too few: one half of the columns is computed after the other.
    """
    is_paired = like == types.uint16  # for AVX-512 alone
    multiplied = emitter.dot_pairs if is_paired else emitter.fma
    x_bytes = like.bitwidth // 8

    def emit(num_rows: int) -> None:
        lanes = LANES if is_paired or num_rows <= WHOLE_ROWS else LANES // 2
        lines = [emitter.address(x[0], index(r), x[1], x_bytes) for r in range(num_rows)]
        outs = [emitter.address(out[0], index(r), out[1], 4) for r in range(num_rows)]
        for c in range(0, LANES, lanes):
            emit_columns(c, lanes, lines, outs)

    def emit_columns(c: int, lanes: int, lines: list[Any], outs: list[Any]) -> None:
        def body(k: Any, sums: list[Any]) -> list[Any]:
            both = columns(k, c, lanes)
            factors = [emitter.load_spread(emitter.address(line, k, index(1), 4), lanes) for line in lines]
            pairs = [(factor, column) for factor in factors for column in both]
            return [multiplied(*pair, before) for pair, before in zip(pairs, sums, strict=True)]

        places = [emitter.beyond(line, (c + half) * 4) for line in outs for half in range(0, STRIP, LANES)]
        initial = [emitter.load(place, lanes) if is_added else splat(0.0, lanes) for place in places]
        for place, total in zip(places, emitter.loop(count, initial, body), strict=True):
            emitter.store(total, place)

    emitter.select_rows(rows, MAX_ROWS, emit)


@emitted(types.float32)
def largest(emitter: Emitter, numbers: Any, count: Any) -> Any:
    """The largest of count * 16 float32."""

    def body(k: Any, most: list[Any]) -> list[Any]:
        return [emitter.larger(most[0], emitter.load(emitter.vector_address(numbers, k)))]

    return emitter.largest(emitter.loop(count, [splat(-math.inf)], body)[0])


@emitted(types.float32)
def exponentials(emitter: Emitter, like: Any, numbers: Any, scale: Any, shift: Any, count: Any, out: Any) -> Any:
    """out = exp(scale * x - shift) over count * 16 float32, as bfloat16 if that is the type of `like`; returns the sum.

    No exponent may be far above 0.
    """
    builder, is_rounded = emitter.builder, like == types.uint16
    factor, most = emitter.spread(scale), emitter.spread(shift)

    def body(k: Any, sums: list[Any]) -> list[Any]:
        scaled = builder.fmul(emitter.load(emitter.vector_address(numbers, k)), factor)
        power = builder.fmul(builder.fsub(scaled, most), splat(LOG2_E))
        value = emitter.exp2(power, is_rounded=is_rounded)
        emitter.store_as(value, emitter.vector_address(out, k, 2 if is_rounded else 4), is_rounded)
        return [builder.fadd(sums[0], value)]

    return emitter.total(emitter.loop(count, [splat(0.0)], body)[0])


@emitted()
def rotate(emitter: Emitter, head: Any, table: Any, count: Any) -> None:
    """Rotary embedding in place: head [D], table [2, D] of cosines and signed sines (see `rotary_values`).

    D is count * 16 float32, an even number of vectors.
    """
    builder = emitter.builder
    half = builder.sdiv(count, index(2))

    def body(k: Any, _: list[Any]) -> list[Any]:
        numbers = [k, builder.add(k, half)]
        places = [emitter.vector_address(head, number) for number in numbers]
        values = [emitter.load(place) for place in places]
        for number, place, value, other in zip(numbers, places, values, reversed(values), strict=True):
            cosines = emitter.load(emitter.vector_address(table, number))
            sines = emitter.load(emitter.vector_address(table, builder.add(number, count)))
            emitter.store(builder.fadd(builder.fmul(value, cosines), builder.fmul(other, sines)), place)
        return []

    emitter.loop(half, [], body)


@emitted()
def gated(emitter: Emitter, gate: Any, up: Any, count: Any) -> None:
    """In place gate = silu(gate) * up over count * 16 float32."""
    builder = emitter.builder

    def body(k: Any, _: list[Any]) -> list[Any]:
        place = emitter.vector_address(gate, k)
        value = emitter.load(place)
        decay = emitter.exp(builder.fsub(splat(0.0), value))
        activated = builder.fdiv(value, builder.fadd(splat(1.0), decay))
        emitter.store(builder.fmul(activated, emitter.load(emitter.vector_address(up, k))), place)
        return []

    emitter.loop(count, [], body)


@emitted()
def gelu(emitter: Emitter, numbers: Any, count: Any) -> None:
    """In place x -> x Phi(x) over count * 16 float32, Phi by erf: Abramowitz and Stegun, 7.1.26, within 1e-7."""
    builder = emitter.builder

    def phi(value: Any) -> Any:
        z = builder.fmul(emitter.magnitude(value), splat(math.sqrt(0.5)))
        t = builder.fdiv(splat(1.0), emitter.fma(z, splat(0.3275911), splat(1.0)))
        series = splat(1.061405429)
        for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series = emitter.fma(series, t, splat(factor))
        decay = emitter.exp(builder.fsub(splat(0.0), builder.fmul(z, z)))
        beyond = builder.fmul(splat(0.5), builder.fmul(builder.fmul(series, t), decay))
        is_negative = builder.fcmp_ordered("<", value, splat(0.0))
        return builder.select(is_negative, beyond, builder.fsub(splat(1.0), beyond))

    _multiply_each(emitter, numbers, count, phi)


@emitted()
def tanh_gelu(emitter: Emitter, numbers: Any, count: Any) -> None:
    """Like `gelu`, with Phi by tanh: 1 / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))."""
    builder = emitter.builder

    def phi(value: Any) -> Any:
        cube = builder.fmul(builder.fmul(value, value), value)
        inner = emitter.fma(cube, splat(0.044715), value)
        decay = emitter.exp(builder.fmul(inner, splat(-2 * math.sqrt(2 / math.pi))))
        return builder.fdiv(splat(1.0), builder.fadd(splat(1.0), decay))

    _multiply_each(emitter, numbers, count, phi)


def _multiply_each(emitter: Emitter, numbers: Any, count: Any, factor_of: Callable[[Any], Any]) -> None:
    """Multiply each of count * 16 float32 in place by a function of itself."""

    def body(k: Any, _: list[Any]) -> list[Any]:
        place = emitter.vector_address(numbers, k)
        value = emitter.load(place)
        emitter.store(emitter.builder.fmul(value, factor_of(value)), place)
        return []

    emitter.loop(count, [], body)


@emitted(types.float32)
def centred(emitter: Emitter, numbers: Any, count: Any, out: Any) -> Any:
    """out = x - mean(x) over count * 16 float32; returns the sum of out's squares."""
    builder = emitter.builder

    def add(k: Any, sums: list[Any]) -> list[Any]:
        return [builder.fadd(sums[0], emitter.load(emitter.vector_address(numbers, k)))]

    total = emitter.total(emitter.loop(count, [splat(0.0)], add)[0])
    width = builder.sitofp(builder.mul(count, index(LANES)), total.type)
    mean = emitter.spread(builder.fdiv(total, width))

    def centre(k: Any, sums: list[Any]) -> list[Any]:
        value = builder.fsub(emitter.load(emitter.vector_address(numbers, k)), mean)
        emitter.store(value, emitter.vector_address(out, k))
        return [emitter.fma(value, value, sums[0])]

    return emitter.total(emitter.loop(count, [splat(0.0)], centre)[0])


@emitted(types.float32)
def sum_of_squares(emitter: Emitter, numbers: Any, count: Any) -> Any:
    """The sum of squares of count * 16 float32."""

    def body(k: Any, sums: list[Any]) -> list[Any]:
        part = emitter.load(emitter.vector_address(numbers, k))
        return [emitter.fma(part, part, sums[0])]

    return emitter.total(emitter.loop(count, [splat(0.0)], body)[0])


@emitted()
def clear(emitter: Emitter, numbers: Any, count: Any) -> None:
    """Set count * 16 float32 to 0."""

    def body(k: Any, _: list[Any]) -> list[Any]:
        emitter.store(splat(0.0), emitter.vector_address(numbers, k))
        return []

    emitter.loop(count, [], body)


@emitted()
def copy_line(emitter: Emitter, like: Any, source: Any, target: Any, count: Any) -> None:
    """Copy count * 16 float32, to bfloat16 if that is the type of `like`."""
    is_rounded = like == types.uint16

    def body(k: Any, _: list[Any]) -> list[Any]:
        value = emitter.load(emitter.vector_address(source, k))
        emitter.store_as(value, emitter.vector_address(target, k, 2 if is_rounded else 4), is_rounded)
        return []

    emitter.loop(count, [], body)
