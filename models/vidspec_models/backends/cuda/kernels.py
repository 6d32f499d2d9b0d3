"""Three small kernels of a decoding step on CUDA: rotation and attention, in Triton, part of torch's CUDA builds.

The kernels find caches through a table of addresses, so one captured graph serves every request. A row's attention is a
sum over tiles of `TILE` keys, which are assigned to `SPLITS` programs by their place alone and added in a fixed order.
A tile that a row may not see adds exact zeros. So a row gets the same bits whatever rows share its forward and however
long their contexts are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton interprets the annotations of kernel arguments, so only constexpr is annotated.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # keys that a program reads at once; most programs read one tile, so loads need no pipeline
SPLITS = 64  # programs per key/value head: up to 8192 keys, no program has to read a second tile
LINES = 64  # query heads x rows of a program: one shape for any number of rows, so that all products are alike
_HOPPER = (9, 0)
_LOG2_E = 1.4426950408889634


def _rotate_and_store(parts, bias, table, positions, rows, norm, queries, layer, eps,  # noqa: PLR0913
                      ROWS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
                      HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    partner = (d + D // 2) % D
    kind = queries.dtype.element_ty
    x = tl.zeros((D,), tl.float32)
    other = tl.zeros((D,), tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + head * D + d).to(tl.float32)
        other += tl.load(bias + head * D + partner).to(tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for part in tl.static_range(PARTS):
        source = parts + ((part * ROWS + row) * (HEADS + 2 * KV) + head) * D
        x += tl.load(source + d)
        other += tl.load(source + partner)
    if head < HEADS + KV:
        if HAS_NORM:
            power = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * power * tl.load(norm + head * D + d).to(tl.float32)
            other = other * power * tl.load(norm + head * D + partner).to(tl.float32)
        line = table + tl.load(positions + row) * 2 * D
        x = x * tl.load(line + d).to(tl.float32) + other * tl.load(line + D + d).to(tl.float32)
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * D + d, x.to(kind))
    else:
        which = (head - HEADS) // KV  # 0: keys, 1: values
        place = tl.load(rows + row * 4 + 3)
        if place >= 0:
            cache = tl.load(rows + row * 4 + which).to(tl.pointer_type(kind))
            capacity = tl.load(rows + row * 4 + 2)
            line_of_head = layer * KV + (head - HEADS) % KV
            tl.store(cache + (line_of_head * capacity + place) * D + d, x.to(kind))


def _attend_tiles(queries, blocks, sums, peaks, weights, layer, scale,  # noqa: PLR0913
                  HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr,
                  TILE: tl.constexpr, SPLITS: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_rows, start = tl.load(blocks + block * 6 + 4), tl.load(blocks + block * 6 + 5)
    length = start + num_rows
    if (num_rows > 0) & (split * TILE < length):
        group: tl.constexpr = HEADS // KV
        kind = queries.dtype.element_ty
        d, n, line = tl.arange(0, D), tl.arange(0, TILE), tl.arange(0, LINES)
        row = line // group
        is_row = row < num_rows
        first = tl.load(blocks + block * 6 + 3)
        places = ((first + row) * HEADS + head * group + line % group)[:, None] * D + d[None, :]
        q = tl.load(queries + places, mask=is_row[:, None], other=0.0)
        offset = (layer * KV + head) * tl.load(blocks + block * 6 + 2) * D
        # The compiler cannot know how an address from a table is aligned: without the hint it reads 2 bytes at a time.
        keys = tl.multiple_of(tl.load(blocks + block * 6).to(tl.pointer_type(kind)), 16) + offset
        values = tl.multiple_of(tl.load(blocks + block * 6 + 1).to(tl.pointer_type(kind)), 16) + offset
        total = tl.zeros((LINES, D), tl.float32)
        weight = tl.zeros((LINES,), tl.float32)
        peak = tl.full((LINES,), float("-inf"), tl.float32)
        for at in range(split * TILE, length, SPLITS * TILE):
            key = at + n
            k = tl.load(keys + key[:, None] * D + d[None, :], mask=(key < length)[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(key[None, :] <= (start + row)[:, None], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # a line that has seen nothing yet
            shares = tl.exp2(scores - finite[:, None])
            kept = tl.exp2(peak - finite)
            weight = weight * kept + tl.sum(shares, 1)
            v = tl.load(values + key[:, None] * D + d[None, :], mask=(key < length)[:, None], other=0.0)
            total = total * kept[:, None] + tl.dot(shares.to(kind), v, input_precision="ieee")
            peak = higher
        part = ((block * KV + head) * SPLITS + split) * LINES + line
        tl.store(sums + part[:, None] * D + d[None, :], total, mask=is_row[:, None])
        tl.store(peaks + part, peak, mask=is_row)
        tl.store(weights + part, weight, mask=is_row)


def _combine(sums, peaks, weights, blocks, mixed,  # noqa: PLR0913
             HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr,
             TILE: tl.constexpr, SPLITS: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    block, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_rows = tl.load(blocks + block * 6 + 4)
    if row < num_rows:
        group: tl.constexpr = HEADS // KV
        d, split = tl.arange(0, D), tl.arange(0, SPLITS)
        is_there = split * TILE < tl.load(blocks + block * 6 + 5) + num_rows
        part = ((block * KV + head // group) * SPLITS + split) * LINES + row * group + head % group
        peak = tl.load(peaks + part, mask=is_there, other=float("-inf"))
        factor = tl.exp2(peak - tl.max(peak, 0))
        weight = tl.sum(tl.load(weights + part, mask=is_there, other=0.0) * factor, 0)
        total = tl.load(sums + part[:, None] * D + d[None, :], mask=is_there[:, None], other=0.0)
        place = ((tl.load(blocks + block * 6 + 3) + row) * HEADS + head) * D + d
        tl.store(mixed + place, (tl.sum(total * factor[:, None], 0) / weight).to(mixed.dtype.element_ty))


class CudaKernels:
    """Launchers for one model's H query heads and KV key/value heads of width D; `options` go to every launch."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, options: Mapping[str, Any]
    ) -> None:
        self._heads = {"HEADS": num_heads, "KV": num_kv_heads, "D": head_dim}
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._scale = scale * _LOG2_E
        self._options = options
        self.rows_per_block = LINES // (num_heads // num_kv_heads)
        # One kernel for all layers: Triton would specialise for layer 1, and for multiples of 16.
        self._rotate: Any = triton.jit(_rotate_and_store, do_not_specialize=["layer"])
        self._tiles: Any = triton.jit(_attend_tiles, do_not_specialize=["layer"])
        self._parts: Any = triton.jit(_combine)

    def rotate_and_store(
        self,
        parts: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        rows: Tensor,
        norm: tuple[Tensor | None, float],
        layer: int,
    ) -> Tensor:
        """Sum float32 parts [p, n, (H + 2 KV) * D]; return rotated queries [n, H, D], write keys and values to caches.

        `rotary` is the table [positions, 2, D] and the rows' positions int64 [n]; `norm` has the weights [H + KV, D] of
        query/key norms, or None, and their epsilon.
        """
        table, positions = rotary
        weight, eps = norm
        num_rows = parts.shape[1]
        queries = table.new_empty(num_rows, self._num_heads, self._head_dim)
        shape = {**self._heads, "ROWS": num_rows, "PARTS": len(parts)}
        given = {"HAS_BIAS": bias is not None, "HAS_NORM": weight is not None}
        bias, weight = (table if each is None else each for each in (bias, weight))
        grid = (num_rows, self._num_heads + 2 * self._num_kv_heads)
        self._rotate[grid](
            parts, bias, table, positions, rows, weight, queries, layer, eps, **shape, **given, **self._options
        )
        return queries

    def attend(self, queries: Tensor, blocks: Tensor, layer: int) -> Tensor:
        """Attention [n, H * D] of the rows described by `blocks` [B, 6] (see `batch`); other rows are undefined."""
        num_blocks = blocks.shape[0]
        parts = (num_blocks, self._num_kv_heads, SPLITS, LINES)
        sums = torch.empty((*parts, self._head_dim), dtype=torch.float32, device=queries.device)
        peaks, weights = torch.empty((2, *parts), dtype=torch.float32, device=queries.device).unbind(0)
        mixed = torch.empty_like(queries)
        shape = {**self._heads, "LINES": LINES, "TILE": TILE, "SPLITS": SPLITS}
        tiles, rows = (num_blocks, *parts[1:3]), (num_blocks, self.rows_per_block, self._num_heads)
        self._tiles[tiles](
            queries, blocks, sums, peaks, weights, layer, self._scale, **shape, num_stages=1, **self._options
        )
        self._parts[rows](sums, peaks, weights, blocks, mixed, **shape, **self._options)
        return mixed.flatten(1)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Launch options of every kernel of a step. From Hopper on, each kernel is set up while the previous one still runs
    and then waits for it (programmatic dependent launch): no idle gaps between a step's some 250 kernels.
    """
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
    early = {"launch_pdl": True} if is_early else {}
    return {"IS_EARLY": is_early, "enable_fp_fusion": True, **early}  # explicit: Triton's default may change


def supports(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether the kernels support these heads: widths that are powers of two, a group that fits one program."""
    is_power = head_dim & (head_dim - 1) == 0
    return is_power and 16 <= head_dim <= 256 and num_heads // num_kv_heads <= LINES
