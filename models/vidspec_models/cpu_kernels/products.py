"""What a step does row by row: products with strips of weights, and root-mean-square norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from vidspec_models.cpu_kernels.compiling import compiled
from vidspec_models.cpu_kernels.lines import copy_line, sum_of_squares
from vidspec_models.cpu_kernels.strips import MAX_ROWS, STRIP, strip_tile
from vidspec_models.cpu_kernels.vectors import LANES

Array = NDArray[Any]
FLOAT = 4  # bytes


def operand(x: Array, strips: Array) -> Array:
    """x [n, K] in the arithmetic that the strips are for."""
    raise NotImplementedError("compiled only")


@overload(operand)
def _operand(x: Any, strips: Any) -> Any:
    def rounded(x: Any, strips: Any) -> Any:
        out = np.empty(x.shape, np.uint16)
        for row in range(x.shape[0]):
            copy_line(out, x[row].ctypes.data, out[row].ctypes.data, x.shape[1] // LANES)
        return out

    def same(x: Any, strips: Any) -> Any:
        return x

    return rounded if strips.dtype == types.uint16 else same


@compiled
def product(x: Array, strips: Array, out: Array) -> None:
    """out [n, N] += x [n, K] times strips [N / 32, K, 32], see `StepWeights`."""
    x = operand(x, strips)
    num_rows, inner, width = x.shape[0], strips.shape[1], strips.shape[2]
    num_tiles = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    x_stride, out_stride = x.shape[1], out.shape[1]
    for strip in range(strips.shape[0]):
        weights = strips[strip].ctypes.data
        first = 0
        for tile in range(num_tiles):
            last = num_rows * (tile + 1) // num_tiles
            lines = x.ctypes.data + first * x_stride * x.itemsize
            place = out.ctypes.data + (first * out_stride + strip * STRIP) * FLOAT
            strip_tile(x, strips, last - first, lines, x_stride, weights, width, place, out_stride, inner)
            first = last


@compiled
def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row; [n, K]."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        squares = sum_of_squares(x[row].ctypes.data, width // LANES)
        factor = np.float32(1.0 / math.sqrt(squares / width + eps))
        for column in range(width):
            out[row, column] = x[row, column] * factor * weight[column]
