"""LLVM vectors for numba: the few instructions that the kernels' tiles consist of.

LLVM maps the vectors, mostly of 16 lanes, to what the machine has: one AVX-512 register, two of AVX2, four of NEON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vidspec_models.backends.cpu.packing import LANES

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
_INTEGERS = ir.VectorType(I32, LANES)
_SHORT = ir.IntType(16)
_SHORTS = ir.VectorType(_SHORT, LANES)
_MULTIPLY_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
_MULTIPLY_BYTES = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_ADD_QUADS = {8: ("{vex} vpdpbusd $3, $2, $0", "=x,0,x,x"), 16: ("vpdpbusd $3, $2, $0", "=v,0,v,v")}
CACHE_LINE = 64  # bytes
_AHEAD = 512 * CACHE_LINE  # bytes: memory latency lasts hundreds of products; measured with 4 KiB to 128 KiB
LOG2_E = 1.4426950408889634
# 2**f on [-0.5, 0.5], Taylor series of exp(f ln 2): the first omitted term is below half a unit in the last place.
_EXP2 = (1.0, 0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.0001540353, 0.0000152527)
# 2**f with an error of 4e-6, interpolated at Chebyshev points, for bfloat16, whose rounding error is 1000 times larger.
_SHORT_EXP2 = (1.0, 0.6931210452, 0.2402234904, 0.05592197584, 0.009666368515)
_MIN_EXPONENT, _MAX_EXPONENT = -126.0, 127.0
_TO_WHOLE = 1.5 * 2**23  # added to a small float32, the lowest bits of the sum are the nearest integer


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no name for it
    """LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOAT = _BFloat()
_PAIRS = ir.VectorType(_BFLOAT, 2 * LANES)
_PAIRED_SHORTS = ir.VectorType(_SHORT, 2 * LANES)

binding.initialize_native_asmparser()  # for instructions that are emitted as inline assembly


def index(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(I64, value)


def splat(value: float, lanes: int = LANES) -> Any:
    """A vector constant."""
    return ir.Constant(ir.VectorType(F32, lanes), [value] * lanes)


def splat_int(value: int, lanes: int = LANES) -> Any:
    """A vector constant of int32."""
    return ir.Constant(ir.VectorType(I32, lanes), [value] * lanes)


def emitted(result: Any = types.none) -> Any:
    """Turns a function that emits code, given an Emitter and arguments, into one that compiled code can call.

    For an array argument the function gets the type of the elements: arrays are passed only for their type.
    """

    def made(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def typed(_typing: Any, *kinds: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                pairs = zip(kinds, values, strict=True)
                told = [kind.dtype if isinstance(kind, types.Array) else value for kind, value in pairs]
                returned = emit(Emitter(builder), *told)
                return context.get_dummy_value() if result is types.none else returned

            return result(*kinds), generate

        return intrinsic(typed)

    return made


class Emitter:
    """Emits into one builder; addresses are int64, strides count elements."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: Any, arguments: list[Any], **flags: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments, **flags)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{c.type.count}f32", c.type, [a, b, c])

    def dot_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """c + the products of a's and b's pairs of bfloat16, one pair per lane; x86 with AVX512_BF16 only."""
        pairs = [self.builder.bitcast(vector, _PAIRS) for vector in (a, b)]
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [c, *pairs])

    def total(self, vector: Any) -> Any:
        """Sum of the lanes, always added in the same tree."""
        arguments = [ir.Constant(F32, 0.0), vector]
        return self.call("llvm.vector.reduce.fadd.v16f32", F32, arguments, fastmath=("reassoc",))

    def transposed(self, vectors: list[Any]) -> list[Any]:
        """Transpose 16 vectors: lane j of vector i goes to lane i of vector j. Swaps blocks of 1, 2, 4 and 8 lanes."""
        lanes = range(LANES)
        for width in (1, 2, 4, 8):
            first = [lane if lane // width % 2 == 0 else LANES + lane - width for lane in lanes]
            second = [lane + width if lane // width % 2 == 0 else LANES + lane for lane in lanes]
            for i in (number for number in lanes if number // width % 2 == 0):
                pair = vectors[i], vectors[i + width]
                vectors[i], vectors[i + width] = self._picked(*pair, first), self._picked(*pair, second)
        return vectors

    def in_pairs(self, a: Any, b: Any) -> list[Any]:
        """Interleave two lines a and b of 32 bfloat16 to 32 pairs, in two vectors."""
        numbers = [self.builder.bitcast(line, _PAIRED_SHORTS) for line in (a, b)]
        pairs = [lane + of for lane in range(2 * LANES) for of in (0, 2 * LANES)]
        halves = (pairs[: 2 * LANES], pairs[2 * LANES :])
        return [self.builder.bitcast(self._picked(numbers[0], numbers[1], half), VECTOR) for half in halves]

    def _picked(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """The given lanes of a and b joined; those of b are numbered after those of a."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def larger(self, a: Any, b: Any) -> Any:
        """The larger per lane: one instruction, unlike LLVM's maxnum, which checks for NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def largest(self, vector: Any) -> Any:
        """The largest of the lanes, in halves: LLVM's own reduction looks at one lane after the other, for NaN."""
        width = LANES
        while width > 1:
            width //= 2
            low, high = (self._picked(vector, vector, range(start, start + width)) for start in (0, width))
            vector = self.larger(low, high)
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def exp(self, x: Any) -> Any:
        """e**x, limited to the range of float32."""
        power = self.smaller(self.builder.fmul(x, splat(LOG2_E)), splat(_MAX_EXPONENT))
        return self.exp2(power, is_rounded=False)

    def exp2(self, power: Any, *, is_rounded: bool) -> Any:
        """2**power as 2**whole * 2**rest, for powers up to 127; `is_rounded`: only as accurate as bfloat16 needs."""
        builder = self.builder
        power = self.larger(power, splat(_MIN_EXPONENT))
        shifted = builder.fadd(power, splat(_TO_WHOLE))
        rest = builder.fsub(power, builder.fsub(shifted, splat(_TO_WHOLE)))
        factors = _SHORT_EXP2 if is_rounded else _EXP2
        value = splat(factors[-1])
        for factor in reversed(factors[:-1]):
            value = self.fma(value, rest, splat(factor))
        exponent = builder.shl(builder.bitcast(shifted, _INTEGERS), splat_int(23))
        return builder.bitcast(builder.add(builder.bitcast(value, _INTEGERS), exponent), VECTOR)

    def address(self, base: Any, position: Any, stride: Any, size: int) -> Any:
        """base + position * stride elements of `size` bytes."""
        builder = self.builder
        return builder.add(base, builder.mul(builder.mul(position, stride), index(size)))

    def vector_address(self, base: Any, number: Any, size: int = 4) -> Any:
        """The address of vector `number`, with elements of `size` bytes."""
        return self.address(base, number, index(LANES), size)

    def smaller_index(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def beyond(self, base: Any, num_bytes: int) -> Any:
        return self.builder.add(base, index(num_bytes)) if num_bytes else base

    def load(self, address: Any, lanes: int = LANES, kind: Any = F32) -> Any:
        """Load a vector of float32 or of integers, from an address that is a multiple of 4."""
        loaded = self.builder.load(self.builder.inttoptr(address, ir.VectorType(kind, lanes).as_pointer()))
        loaded.align = 4
        return loaded

    def load_bytes(self, address: Any, count: int) -> Any:
        """Load `count` int8 as int16."""
        return self.builder.sext(self.load(address, count, ir.IntType(8)), ir.VectorType(_SHORT, count))

    def load_bytes_as_words(self, address: Any, lanes: int) -> Any:
        """Load one unsigned byte a lane."""
        return self.builder.zext(self.load(address, lanes, ir.IntType(8)), ir.VectorType(I32, lanes))

    def multiply_pairs(self, a: Any, b: Any) -> Any:
        """int32 a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] for int16 vectors; a is passed as 32-bit words."""
        builder, lanes = self.builder, a.type.count

        def widened(vector: Any, of: int) -> Any:
            return builder.sext(self._picked(vector, vector, range(of, 2 * lanes, 2)), a.type)

        shorts = [builder.bitcast(vector, ir.VectorType(_SHORT, 2 * lanes)) for vector in (a, b)]
        products = [builder.mul(*(widened(vector, of) for vector in shorts)) for of in (0, 1)]
        return builder.add(*products)

    def multiply_pairs_x86(self, a: Any, b: Any, most_lanes: int) -> Any:
        """`multiply_pairs` as one instruction for 8 lanes (AVX2) or 16 (AVX-512), which LLVM does not find itself."""

        def multiply(*words: Any) -> Any:
            lanes = words[0].type.count
            shorts = [self.builder.bitcast(vector, ir.VectorType(_SHORT, 2 * lanes)) for vector in words]
            return self.call(_MULTIPLY_PAIRS[lanes], words[0].type, shorts)

        return self._in_halves(multiply, [a, self.builder.bitcast(b, a.type)], most_lanes)

    def multiply_bytes_x86(self, a: Any, b: Any, most_lanes: int) -> Any:
        """Two int16 a lane, each the sum of two products of int8, those of a unsigned; sums must fit."""

        def multiply(*words: Any) -> Any:
            lanes = words[0].type.count
            numbers = [self.builder.bitcast(vector, ir.VectorType(ir.IntType(8), 4 * lanes)) for vector in words]
            products = self.call(_MULTIPLY_BYTES[lanes], ir.VectorType(_SHORT, 2 * lanes), numbers)
            return self.builder.bitcast(products, words[0].type)

        return self._in_halves(multiply, [a, b], most_lanes)

    def add_shorts(self, a: Any, b: Any) -> Any:
        """Sums of the two int16 of each lane."""
        kind = ir.VectorType(_SHORT, 2 * a.type.count)
        return self.builder.bitcast(
            self.builder.add(self.builder.bitcast(a, kind), self.builder.bitcast(b, kind)), a.type
        )

    def add_quads(self, a: Any, b: Any, c: Any, most_lanes: int) -> Any:
        """c + the products of a's and b's four int8 per lane, those of a unsigned, all in 32-bit words.

        One instruction for 8 lanes (AVX-VNNI) or 16 (AVX512_VNNI). Emitted as assembly, since LLVM splits the
        instruction in two if it sees a chain of sums.
        """

        def add(*words: Any) -> Any:
            kind = words[0].type
            asm, constraints = _ADD_QUADS[kind.count]
            return self.builder.asm(ir.FunctionType(kind, [kind] * 3), asm, constraints, list(words), side_effect=False)

        return self._in_halves(add, [c, a, b], most_lanes)

    def _in_halves(self, work: Callable[..., Any], words: list[Any], most_lanes: int) -> Any:
        """Apply `work` to int32 vectors; to one half after the other if they have more than `most_lanes` lanes."""
        lanes = words[0].type.count
        if lanes <= most_lanes:
            return work(*words)
        halves = (range(most_lanes), range(most_lanes, lanes))
        first, second = (work(*(self._picked(vector, vector, half) for vector in words)) for half in halves)
        return self._picked(first, second, range(lanes))

    def as_floats(self, vector: Any) -> Any:
        return self.builder.sitofp(vector, ir.VectorType(F32, vector.type.count))

    def magnitude(self, vector: Any) -> Any:
        return self.call("llvm.fabs.v16f32", VECTOR, [vector])

    def nearest_integers(self, vector: Any) -> Any:
        """16 float32 rounded to int32."""
        return self.builder.fptosi(self.call("llvm.rint.v16f32", VECTOR, [vector]), _INTEGERS)

    def shortened(self, integers: Any, num_bytes: int) -> Any:
        """Int32 truncated to integers of `num_bytes` bytes, which they must fit."""
        return self.builder.trunc(integers, ir.VectorType(ir.IntType(8 * num_bytes), integers.type.count))

    def sum_of_integers(self, integers: Any) -> Any:
        """The sum of 16 int32."""
        return self.call("llvm.vector.reduce.add.v16i32", I32, [integers])

    def load_halves(self, address: Any, lanes: int = LANES) -> list[Any]:
        """Load words of two bfloat16; returns the lower and the upper halves as two float32 vectors."""
        builder, words = self.builder, self.load(address, lanes, I32)
        lower = builder.shl(words, splat_int(16, lanes))
        upper = builder.and_(words, splat_int(0xFFFF0000, lanes))
        return [builder.bitcast(half, ir.VectorType(F32, lanes)) for half in (lower, upper)]

    def rounded(self, vector: Any) -> Any:
        """Round to 16 bfloat16: to nearest, ties to even; x86 with AVX512_BF16 only."""
        halves = self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFLOAT, LANES), [vector])
        return self.builder.bitcast(halves, _SHORTS)

    def prefetch(self, address: Any) -> None:
        """Prefetch the data some way ahead of a line of weights, keys or values that are read in memory order.

        An invalid address does no harm. Prefetches into the second-level cache: the first level has too few buffers for
        lines in flight.
        """
        place = self.builder.inttoptr(self.beyond(address, _AHEAD), ir.IntType(8).as_pointer())
        how = [I32(flag) for flag in (0, 2, 1)]  # read access, second-level cache, data
        self.call("llvm.prefetch.p0", ir.VoidType(), [place, *how])

    def spread(self, scalar: Any, lanes: int = LANES) -> Any:
        """One number in all lanes."""
        nothing = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        one = self.builder.insert_element(nothing, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, one, splat_int(0, lanes))

    def load_spread(self, address: Any, lanes: int = LANES, kind: Any = F32) -> Any:
        return self.spread(self.builder.load(self.builder.inttoptr(address, kind.as_pointer())), lanes)

    def store(self, value: Any, address: Any) -> None:
        stored = self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()))
        stored.align = 2  # the alignment of bfloat16

    def store_as(self, value: Any, address: Any, is_rounded: bool) -> None:
        """Store as float32, or rounded to bfloat16."""
        self.store(self.rounded(value) if is_rounded else value, address)

    def unknown(self, value: int) -> Any:
        """An int64 constant that LLVM does not know: a loop with few steps is not unrolled, which would spill sums."""
        return self.builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [index(value)], side_effect=False)

    def loop(self, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """`for k in range(count)` with vectors carried in registers; count must be at least 1."""
        builder = self.builder
        before, inside = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        position = builder.phi(I64)
        carried = [builder.phi(first.type) for first in initial]
        results = body(position, carried)
        following = builder.add(position, index(1))
        position.add_incoming(index(0), before)
        latch = builder.block  # differs from `inside` if the body contains a loop
        position.add_incoming(following, latch)
        for phi, first, result in zip(carried, initial, results, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(result, latch)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results

    def select_rows(self, rows: Any, most: int, emit: Callable[[int], None]) -> None:
        """Run the code emitted for this number of rows, 1..most; other numbers do nothing."""
        builder = self.builder
        end = builder.append_basic_block("rows.end")
        switch = builder.switch(rows, end)
        for count in range(1, most + 1):
            case = builder.append_basic_block(f"rows.{count}")
            switch.add_case(index(count), case)
            builder.position_at_end(case)
            emit(count)
            builder.branch(end)
        builder.position_at_end(end)
