"""A decoding step, compiled: all rows through all layers.

Everything a row's values depend on is computed by the same chain of operations however many rows share the step.

Two arithmetics, told apart by the arrays' types when a kernel is compiled. In *float32* all operands are float32. In
*bfloat16* (uint16 arrays; only where the processor multiplies it) the operands of products, queries, keys and values
are rounded to bfloat16; everything else, all sums above all, stays float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vidspec_models.cpu_kernels.attending import MAX_LINES, attend_segment
from vidspec_models.cpu_kernels.compiling import compiled
from vidspec_models.cpu_kernels.lines import copy_line, gated
from vidspec_models.cpu_kernels.products import Array, product, rms_norm
from vidspec_models.cpu_kernels.strips import STRIP
from vidspec_models.cpu_kernels.vectors import LANES


class StepWeights(NamedTuple):
    """A model of L layers for one step: H query heads, KV key/value heads of width D, hidden size E, MLP width M.

    Products come in strips (see `product`), their columns padded to whole strips. Sizes below are those of float32;
    a row of a strip may be 16 words of two bfloat16, and in bfloat16 arithmetic two rows are one of 64 (see
    `strip_tile`).
    """

    attention_norm: Array  # [L, E]
    qkv: Array  # [L, strips, E, 32]
    qkv_bias: Array  # [L, strips * 32]
    head_norm: Array  # [L, H + KV, D], or [L, 0, D] where heads are not normalised
    output: Array  # [L, strips, H * D, 32]
    mlp_norm: Array  # [L, E]
    gate_up: Array  # [L, strips, E, 32]
    down: Array  # [L, strips, M, 32]
    final_norm: Array  # [E]
    head: Array  # [strips, E, 32]


@compiled
def decode(
    hidden: Array, tables: Array, segments: Array, num_heads: int, num_kv_heads: int, eps: float, scale: float,
    weights: StepWeights, queries: Array,
) -> Array:  # fmt: skip
    """Logits [n, V padded] of rows hidden [n, E] (overwritten) with rotary tables [n, 2, D].

    queries [64, D] is scratch of the type that keys and values are stored in.
    """
    num_rows, size = hidden.shape
    width = tables.shape[2]
    num_layers, inner = weights.mlp_norm.shape[0], weights.gate_up.shape[1] * STRIP // 2
    normed = np.empty((num_rows, size), np.float32)
    qkv = np.empty((num_rows, weights.qkv_bias.shape[1]), np.float32)
    heads = qkv.reshape(num_rows, num_heads + 2 * num_kv_heads, width)
    mixed = np.empty((num_rows, num_heads, width), np.float32)
    acted = np.empty((num_rows, inner), np.float32)
    longest = 0
    for segment in range(segments.shape[0]):
        longest = max(longest, segments[segment, 1] + segments[segment, 2])
    # One more than is seen: a row's last weight may be multiplied in a pair.
    scores = np.empty((MAX_LINES, (longest // STRIP + 1) * STRIP), np.float32)
    for layer in range(num_layers):
        rms_norm(hidden, weights.attention_norm[layer], eps, normed)
        for row in range(num_rows):
            copy_line(qkv, weights.qkv_bias[layer].ctypes.data, qkv[row].ctypes.data, qkv.shape[1] // LANES)
        product(normed, weights.qkv[layer], qkv)
        for segment in range(segments.shape[0]):
            norm, one = weights.head_norm[layer], segments[segment]
            attend_segment(heads, one, layer, num_kv_heads, norm, tables, eps, scale, queries, scores, mixed)
        product(mixed.reshape(num_rows, num_heads * width), weights.output[layer], hidden)
        rms_norm(hidden, weights.mlp_norm[layer], eps, normed)
        gate_up = np.zeros((num_rows, 2 * inner), np.float32)
        product(normed, weights.gate_up[layer], gate_up)
        for row in range(num_rows):
            gated(gate_up[row].ctypes.data, gate_up[row, inner:].ctypes.data, inner // LANES)
            copy_line(acted, gate_up[row].ctypes.data, acted[row].ctypes.data, inner // LANES)
        product(acted, weights.down[layer], hidden)
    rms_norm(hidden, weights.final_norm, eps, normed)
    logits = np.zeros((num_rows, weights.head.shape[0] * STRIP), np.float32)
    product(normed, weights.head, logits)
    return logits
