"""Kernels in bfloat16 arithmetic on any processor: where it has none, pairs are multiplied in float32, slowly.

Without that whoever works on another machine would break them unseen.
"""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import ir

from vidspec_models.backends.cpu.vectors import F32, I32, Emitter, splat_int
from vidspec_models.decoder.placement import multiplies_bfloat16


@pytest.fixture(autouse=True)
def pairs_are_multiplied_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a kernel is compiled."""

    def dot_pairs(emitter: Emitter, a: Any, b: Any, c: Any) -> Any:
        builder, lanes = emitter.builder, c.type.count
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        words = [builder.bitcast(vector, integers) for vector in (a, b)]
        low = [builder.bitcast(builder.shl(word, splat_int(16, lanes)), floats) for word in words]
        high = [builder.bitcast(builder.and_(word, splat_int(0xFFFF0000, lanes)), floats) for word in words]
        return emitter.fma(high[0], high[1], emitter.fma(low[0], low[1], c))

    if not multiplies_bfloat16():
        monkeypatch.setattr(Emitter, "dot_pairs", dot_pairs)
