"""A SigLIP vision tower and its projector in compiled kernels, which replace their modules' own forward.

Rows attend only to rows of their own frame. So frames go through a layer in parallel, one thread per frame, and a
frame's bits do not depend on other frames. Most time is saved between the products, where torch copies biases and needs
for attention and GELU half as long as for the products (docs/benchmark-log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaOnevisionModel
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vidspec_models.backends.cpu.int8 import TOGETHER
from vidspec_models.backends.cpu.kernel_cache import compiled, inlined
from vidspec_models.backends.cpu.layer_halves import operand, product
from vidspec_models.backends.cpu.layers import FLOAT, attend, room_for_scores
from vidspec_models.backends.cpu.packing import LANES, MAX_LINES, STRIP, Array, as_array, fused_linears, packed
from vidspec_models.backends.cpu.tiles import centred, copy_line, gelu, tanh_gelu, transpose_lines
from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.int8 import BLOCK, vision_linears
from vidspec_models.decoder.placement import attends_in_bfloat16

_ROWS_AT_ONCE = 256  # of a single linear layer


class Linear(NamedTuple):
    """A linear layer from K to N numbers, both padded with zeros to what the products need."""

    weight: Array  # [N / 32, K, 32] in strips, see `StepWeights`
    bias: Array  # [N]


class Norm(NamedTuple):
    """A layer norm of E numbers."""

    weight: Array  # [E]
    bias: Array  # [E]
    eps: float


class Layer(NamedTuple):
    """A layer with H heads of width D, hidden size E = H * D."""

    first_norm: Norm
    qkv: Linear
    num_heads: int
    scale: float  # factor of attention scores
    output: Linear
    second_norm: Norm
    up: Linear
    down: Linear


class Projector(NamedTuple):
    """Maps the tower's rows to the language model's hidden size."""

    up: Linear
    down: Linear


class CompiledLinear:
    """A linear layer's forward in int8. Rows are shared among threads, some at a time."""

    def __init__(self, module: nn.Linear, cores: CoreShare) -> None:
        self._weights = linear(module, is_int8=True, more_inputs=-module.in_features % BLOCK)
        self._num_outputs, self._more_inputs = module.out_features, -module.in_features % BLOCK
        self._cores = cores
        self(torch.zeros(1, module.in_features))  # compiles the kernels, or loads them from an earlier start's cache

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., K] to [..., N] in the same dtype."""
        given = functional.pad(rows.float(), (0, self._more_inputs)).flatten(0, -2).contiguous().numpy()
        out = np.empty((len(given), len(self._weights.bias)), np.float32)

        def multiply_some(first: int) -> None:
            some = slice(first, first + _ROWS_AT_ONCE)
            apply_linear(given[some], self._weights, out[some])

        self._cores.parallel_for(multiply_some, range(0, len(given), _ROWS_AT_ONCE))
        found: Tensor = torch.from_numpy(out)[:, : self._num_outputs].unflatten(0, rows.shape[:-1]).to(rows.dtype)
        return found


class CompiledForward:
    """A module's forward, on torch's number of threads, shared with other computing threads (see `CoreShare`)."""

    def __init__(
        self, compute: Callable[..., None], weights: Layer | Projector, up: nn.Linear, cores: CoreShare
    ) -> None:
        """`compute` takes one frame's rows [P, K] and the output array [P, N]; K is also the input size of `up`."""
        is_int8 = weights.up.weight.dtype == np.int8
        is_rounded = attends_in_bfloat16() if is_int8 else up.weight.dtype is torch.bfloat16
        like = np.empty(0, np.uint16 if is_rounded else np.float32)
        self._compute = partial(compute, weights=weights, like=like)
        self._num_outputs = len(weights.down.bias)
        self._cores = cores
        self(torch.zeros(1, 1, up.in_features))  # compiles the kernels, or loads them from an earlier start's cache

    def __call__(self, frames: Tensor, attention_mask: None = None, **_: Any) -> Tensor:
        """[F, P, K] to [F, P, N] in the same dtype."""
        given = frames.float().contiguous().numpy()
        out = np.empty((*given.shape[:2], self._num_outputs), np.float32)
        self._cores.parallel_for(lambda frame: self._compute(given[frame], out[frame]), range(len(given)))
        return torch.from_numpy(out).to(frames.dtype)


def compile_tower(model: Any, cores: CoreShare, *, is_int8: bool) -> None:
    """Replace modules by kernels where there are kernels for the module, its sizes and arithmetic.

    With `is_int8` all `vision_linears` are computed in int8, each by itself if there are no kernels for its module.
    """
    fused = set[nn.Linear]()
    module: Any
    for module in model.modules():
        if not (linears := fused_linears(module, is_int8=is_int8)):
            continue
        if type(module) is SiglipEncoderLayer:
            module.forward = CompiledForward(encode, layer(module, is_int8), module.mlp.fc1, cores)
        else:
            weights = Projector(*mlp_linears(*linears, is_int8=is_int8))
            module.forward = CompiledForward(project, weights, linears[0], cores)
        fused.update(linears)
    for module in vision_linears(model) if is_int8 else ():
        if module not in fused:
            module.forward = CompiledLinear(module, cores)
    for module in model.modules():
        if isinstance(module, LlavaOnevisionModel):
            module.apply_pooling = pooled


def pooled(rows: Tensor) -> Tensor:
    """`LlavaOnevisionModel.apply_pooling` of rows [F, P, K], without its copy to channels-first."""
    side = isqrt(rows.shape[1])
    cells = rows.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    halved = functional.interpolate(cells, size=(-(-side // 2), -(-side // 2)), mode="bilinear")
    return halved.permute(0, 2, 3, 1).flatten(1, 2)


def layer(module: Any, is_int8: bool) -> Layer:
    """A SigLIP layer's weights in the kernels' layout."""
    attention = module.self_attn
    up, down = mlp_linears(module.mlp.fc1, module.mlp.fc2, is_int8=is_int8)
    return Layer(
        first_norm=norm(module.layer_norm1),
        qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj, is_int8=is_int8),
        num_heads=attention.num_heads,
        scale=attention.scale,
        output=linear(attention.out_proj, is_int8=is_int8),
        second_norm=norm(module.layer_norm2),
        up=up,
        down=down,
    )


def mlp_linears(up: nn.Linear, down: nn.Linear, *, is_int8: bool) -> tuple[Linear, Linear]:
    """Both products of an MLP. Its width may be any: the activation of 0 is 0."""
    missing = -up.out_features % BLOCK
    return linear(up, is_int8=is_int8, more_outputs=missing), linear(down, is_int8=is_int8, more_inputs=missing)


def linear(*modules: nn.Linear, is_int8: bool, more_inputs: int = 0, more_outputs: int = 0) -> Linear:
    """One product for all modules; weights as integers or in the arithmetic of their dtype."""
    weights = [functional.pad(module.weight, (0, more_inputs, 0, more_outputs)) for module in modules]
    weight = packed([weights], TOGETHER if is_int8 else 0)[0]
    bias = torch.cat([torch.zeros(each.out_features) if each.bias is None else each.bias for each in modules])
    return Linear(weight, as_array(functional.pad(bias, (0, len(weight) * STRIP - len(bias)))))


def norm(module: Any) -> Norm:
    return Norm(as_array(module.weight), as_array(module.bias), module.eps)


@compiled
def encode(rows: Array, out: Array, weights: Layer, like: Array) -> None:
    """Compute a layer; keys and values get the type of `like`."""
    num_rows, size = rows.shape
    normed, heads = np.empty_like(rows), np.empty((num_rows + 1, 3 * size), np.float32)  # see `attend_frame`
    layer_norm(rows, weights.first_norm, normed)
    apply_linear(normed, weights.qkv, heads[:num_rows])
    mixed = np.empty_like(rows)
    attend_frame(heads, weights.num_heads, weights.scale, like, mixed)
    apply_linear(mixed, weights.output, out)
    for row in range(num_rows):
        for column in range(size):
            out[row, column] += rows[row, column]
    layer_norm(out, weights.second_norm, normed)
    for row in range(num_rows):
        for column in range(size):
            out[row, column] += weights.down.bias[column]
    add_mlp(normed, weights.up, weights.down, False, out)


@compiled
def project(rows: Array, out: Array, weights: Projector, like: Array) -> None:
    """Compute the projector."""
    fill(out, weights.down.bias)
    add_mlp(rows, weights.up, weights.down, True, out)


@compiled
def apply_linear(rows: Array, weights: Linear, out: Array) -> None:
    """out [n, N] = rows [n, K] times the weight, plus the bias."""
    fill(out, weights.bias)
    multiply(rows, weights.weight, out)


@inlined
def add_mlp(rows: Array, up: Linear, down: Linear, is_exact: bool, out: Array) -> None:
    """out [n, N] += GELU(rows [n, K] up) down, without the last bias; GELU exact or by its tanh approximation."""
    acted = np.empty((MAX_LINES, up.bias.shape[0]), np.float32)
    for first in range(0, rows.shape[0], MAX_LINES):  # few rows, so that `acted` stays in a core's cache
        last = min(first + MAX_LINES, rows.shape[0])
        part = acted[: last - first]
        apply_linear(rows[first:last], up, part)
        if is_exact:
            gelu(part.ctypes.data, part.size // LANES)
        else:
            tanh_gelu(part.ctypes.data, part.size // LANES)
        multiply(part, down.weight, out[first:last])


@compiled
def multiply(x: Array, weight: Array, out: Array) -> None:
    """out [n, N] += x [n, K] times a weight in strips."""
    product(operand(x, weight), weight, out, 0, weight.shape[0])


@compiled
def layer_norm(x: Array, weights: Norm, out: Array) -> None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias, row by row; [n, E]."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        squares = centred(x[row].ctypes.data, width // LANES, out[row].ctypes.data)
        factor = np.float32(1.0 / np.sqrt(squares / width + weights.eps))
        for column in range(width):
            out[row, column] = out[row, column] * factor * weights.weight[column] + weights.bias[column]


@compiled
def fill(out: Array, bias: Array) -> None:
    """Set every row to the bias; a product is added later."""
    for row in range(out.shape[0]):
        copy_line(out, bias.ctypes.data, out[row].ctypes.data, out.shape[1] // LANES)


@inlined
def attend_frame(heads: Array, num_heads: int, scale: float, like: Array, mixed: Array) -> None:
    """Attention of every row to all rows: heads [P + 1, 3 H D] are queries, keys, values; writes mixed [P, H D].

    Heads of any width are padded to whole strips. The row beyond the last one is read but not used: heads are copied in
    whole vectors, of which the numbers beyond a head are then replaced by zeros.
    """
    num_rows, size = mixed.shape
    width = size // num_heads
    padded = (width + STRIP - 1) // STRIP * STRIP
    words = padded * like.itemsize // FLOAT
    keys, values = np.empty((num_rows, padded), like.dtype), np.empty((num_rows, padded), like.dtype)
    queries, out = np.empty((MAX_LINES, padded), like.dtype), np.empty((MAX_LINES, padded), np.float32)
    num_columns = num_rows // STRIP * STRIP  # keys to transpose, once for all rows
    columns = np.empty(num_columns * padded, like.dtype)
    scores = room_for_scores(num_rows)
    for head in range(num_heads):
        at = head * width
        copy_head(heads[:num_rows, size + at :], width, keys)
        copy_head(heads[:num_rows, 2 * size + at :], width, values)
        for row in range(0, num_columns, STRIP):
            transpose_lines(keys[row].ctypes.data, STRIP, words // LANES, columns[row * padded :].ctypes.data)
        for first in range(0, num_rows, MAX_LINES):
            count = min(MAX_LINES, num_rows - first)
            copy_head(heads[first : first + count, at:], width, queries)
            # Pass the lines as heads of a single row, since all of them see the same keys. Addresses of arrays are
            # unsigned, and `attend` would be compiled again for these.
            attend(
                queries, count, len(queries), np.int64(keys.ctypes.data), np.int64(values.ctypes.data),
                np.int64(columns.ctypes.data), num_columns, num_rows, scale, scores, out,
            )  # fmt: skip
            for line in range(count):
                for column in range(width):
                    mixed[first + line, at + column] = out[line, column]


@compiled
def copy_head(heads: Array, width: int, out: Array) -> None:
    """out = the rows' first `width` numbers in its type, then zeros; one call for all rows, as each slice costs."""
    num_vectors = (width + LANES - 1) // LANES
    for row in range(heads.shape[0]):
        source = heads.ctypes.data + row * heads.strides[0]
        copy_line(out, source, out.ctypes.data + row * out.strides[0], num_vectors)
        for column in range(width, out.shape[1]):
            out[row, column] = 0
