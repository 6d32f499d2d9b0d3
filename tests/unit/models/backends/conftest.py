"""Runs bfloat16 kernels on any processor: if it has no bfloat16 arithmetic, pairs are multiplied in float32 and numbers
rounded as integers, which is slow.

Without this, changes made on such a machine could break the kernels unnoticed.
"""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import ir

from vidspec_models.backends.cpu.vectors import F32, I32, Emitter, splat_int
from vidspec_models.decoder.placement import has_avx512_bf16


@pytest.fixture(autouse=True)
def pairs_are_multiplied_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the multiplication of pairs in every kernel that is compiled."""

    def dot_pairs(emitter: Emitter, a: Any, b: Any, c: Any) -> Any:
        builder, lanes = emitter.builder, c.type.count
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        words = [builder.bitcast(vector, integers) for vector in (a, b)]
        low = [builder.bitcast(builder.shl(word, splat_int(16, lanes)), floats) for word in words]
        high = [builder.bitcast(builder.and_(word, splat_int(0xFFFF0000, lanes)), floats) for word in words]
        return emitter.fma(high[0], high[1], emitter.fma(low[0], low[1], c))

    def rounded(emitter: Emitter, vector: Any) -> Any:
        builder, integers = emitter.builder, ir.VectorType(I32, vector.type.count)
        words = builder.bitcast(vector, integers)
        is_odd = builder.and_(builder.lshr(words, splat_int(16)), splat_int(1))
        nearest = builder.add(words, builder.add(is_odd, splat_int(0x7FFF)))
        shorts = ir.VectorType(ir.IntType(16), vector.type.count)
        return builder.trunc(builder.lshr(nearest, splat_int(16)), shorts)

    if not has_avx512_bf16():
        monkeypatch.setattr(Emitter, "dot_pairs", dot_pairs)
        monkeypatch.setattr(Emitter, "rounded", rounded)
