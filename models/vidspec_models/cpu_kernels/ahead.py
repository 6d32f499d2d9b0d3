"""Several decoding steps in one call: each chooses a token, which is the next one's input. What a draft does all day.

A small model's step takes less time than the interpreter takes to start it.
"""

from __future__ import annotations

import math

import numpy as np

from vidspec_models.cpu_kernels.compiling import compiled
from vidspec_models.cpu_kernels.kernels import StepWeights, decode
from vidspec_models.cpu_kernels.products import Array

_START = 2  # of a segment: its rows before the new ones


@compiled
def run_ahead(
    hidden: Array, position: int, embedding: Array, tables: Array, segment: Array, num_heads: int, num_kv_heads: int,
    eps: float, scale: float, weights: StepWeights, queries: Array, sharpness: float, noise: Array,
    tokens: Array, margins: Array,
) -> None:  # fmt: skip
    """Fill tokens [count] and margins [count] after rows hidden [n, E], of which the first is at `position`.

    A token has the largest of `sharpness` times its logit plus its noise [count, V]; its margin is how far the second
    largest is behind. segment [1, SEGMENT_FIELDS] is changed.
    """
    vocabulary = noise.shape[1]
    for i in range(len(tokens)):
        num_rows = hidden.shape[0]
        turned = tables[position : position + num_rows]
        logits = decode(hidden, turned, segment, num_heads, num_kv_heads, eps, scale, weights, queries)[num_rows - 1]
        best, second, chosen = -math.inf, -math.inf, 0
        for token in range(vocabulary):
            score = sharpness * logits[token] + noise[i, token]
            if score > best:
                best, second, chosen = score, best, token
            elif score > second:
                second = score
        tokens[i], margins[i] = chosen, best - second
        position += num_rows
        segment[0, _START] += num_rows
        segment[0, 1] = 1
        hidden = np.copy(embedding[chosen : chosen + 1])
