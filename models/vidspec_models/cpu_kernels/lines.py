"""What a step does to one line after another: exponentials, the gated activation, sums of squares, rounding copies.

Operands are addresses as integers, so that they work on any slice of any array. Arrays named `like` are there for
their type only: float32 or uint16 (a bfloat16).
"""

from __future__ import annotations

import math
from typing import Any

from numba import types
from numba.extending import intrinsic

from vidspec_models.cpu_kernels.vectors import LANES, Emitter, index, splat


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
def exponentials(_typing: Any, like: Any, numbers: Any, scale: Any, shift: Any, count: Any, out: Any) -> Any:
    """out = exp(scale * x - shift) over count * 16 float32, to bfloat16 if `like` says so; returns their sum."""
    is_rounded = like.dtype == types.uint16

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, numbers, scale, shift, count, out = arguments
        emitter = Emitter(builder)
        factor, most = emitter.spread(scale), emitter.spread(shift)

        def body(k: Any, sums: list[Any]) -> list[Any]:
            scaled = builder.fmul(emitter.load(emitter.address(numbers, k, index(LANES), 4)), factor)
            value = emitter.exp(builder.fsub(scaled, most))
            emitter.store_as(value, emitter.address(out, k, index(LANES), 2 if is_rounded else 4), is_rounded)
            return [builder.fadd(sums[0], value)]

        return emitter.total(emitter.loop(count, [splat(0.0)], body)[0])

    return types.float32(like, numbers, types.float32, types.float32, count, out), generate


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
            emitter.store_as(value, emitter.address(target, k, index(LANES), 2 if is_rounded else 4), is_rounded)
            return []

        emitter.loop(count, [], body)
        return context.get_dummy_value()

    return types.none(like, source, target, count), generate
