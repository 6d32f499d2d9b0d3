"""Products of a step's few rows with weights, in Triton: about as fast as a weight can be read, for any number of rows.

cuBLAS uses different kernels for 16 and for 64 rows, with different bits, so with it a 7B model padded every step to 64
rows. Here a row's sum has one order whatever other rows are computed. A weight with few columns does not fill a GPU, so
its inner dimension is split between several programs, whose sums the next kernel adds in order.
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

from vidspec_models.decoder.int8 import BLOCK
from vidspec_models.decoder.int8_weight import Int8Weight

Weight = Tensor | Int8Weight  # [N, K]
COLUMNS = 64  # per program; fewer use an older instruction (mma.sync) and were slower
INNER = 128  # largest inner size of a weight's tile
MAX_STAGES = 4  # tiles loaded ahead, if a multiprocessor has room for them; twice as many of half the size
FETCHED = 1  # tiles prefetched before the rows are ready; two and four were slower
_LINE_BYTES = 128  # of a cache line
_MIN_TILES, _MAX_PARTS = 2, 16
_BUSY = 0.75  # of the multiprocessors: a weight with fewer programs is split


@triton.jit
def _fetch(places):  # into the cache that all multiprocessors share
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def _tile(weight, scales, line, at, is_there, like,  # noqa: PLR0913
          INNER: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """INNER numbers of each line from `at` on, in the type of `like`, with a scale for each BLOCK of them, if any."""
    w = tl.load(weight + line[:, None] + (at + tl.arange(0, INNER))[None, :], mask=is_there[:, None], other=0)
    if BLOCK > 0:
        blocks: tl.constexpr = INNER // BLOCK
        places = ((line + at) // BLOCK)[:, None] + tl.arange(0, blocks)[None, :]
        scale = tl.load(scales + places, mask=is_there[:, None], other=0.0)
        w = tl.reshape(w.to(tl.float32), (w.shape[0], blocks, BLOCK)) * scale[:, :, None]
        w = tl.reshape(w, (w.shape[0], INNER)).to(like.dtype)
    return w


def _multiply(rows, weight, scales, out, num_columns, inner,  # noqa: PLR0913
              ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
              IS_GATED: tl.constexpr, FETCHED: tl.constexpr, LINE: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    n, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    row, k = tl.arange(0, ROWS), tl.arange(0, INNER)
    is_there = n < num_columns
    line, up = n.to(tl.int64) * inner, (num_columns + n).to(tl.int64) * inner
    size = tl.cdiv(inner, PARTS * INNER) * INNER
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    up_total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        line_start = tl.minimum(n, num_columns - 1).to(tl.int64)[:, None] * inner
        for tile in tl.static_range(FETCHED):  # weights do not depend on the previous kernel
            fetched = part * size + tile * INNER + tl.arange(0, INNER // LINE) * LINE
            places = weight + line_start + tl.minimum(fetched, inner - 1)[None, :]
            _fetch(places)
            if IS_GATED:
                _fetch(places + num_columns.to(tl.int64) * inner)
        tl.extra.cuda.gdc_wait()
    for at in range(part * size, tl.minimum(part * size + size, inner), INNER):
        x = tl.load(rows + row[None, :] * inner + (at + k)[:, None])
        w = _tile(weight, scales, line, at, is_there, x, INNER, BLOCK)
        total = tl.dot(w, x, total, input_precision="ieee")
        if IS_GATED:
            w = _tile(weight, scales, up, at, is_there, x, INNER, BLOCK)
            up_total = tl.dot(w, x, up_total, input_precision="ieee")
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    place = (part * ROWS + row).to(tl.int64)[None, :] * num_columns + n[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_there[:, None])


def _add_and_norm(hidden, parts, weight, normed, size, eps,  # noqa: PLR0913
                  ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    is_there = column < size
    kind = hidden.dtype.element_ty
    scale = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(hidden + row * size + column, mask=is_there, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            x += tl.load(parts + (part * ROWS + row) * size + column, mask=is_there, other=0.0)
        rounded = x.to(kind)
        tl.store(hidden + row * size + column, rounded, mask=is_there)
        x = rounded.to(tl.float32)
    power = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(normed + row * size + column, (x * power * scale).to(kind), mask=is_there)


class CudaProducts:
    """Launchers for steps of 16, 32 or 64 rows; `options` go to every launch, see `kernels.launch_options`."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        num_processors, self._room = _limits(device)
        self._least_programs = int(_BUSY * num_processors)
        self._options = options
        self._multiplied: Any = triton.jit(_multiply)
        self._normed: Any = triton.jit(_add_and_norm)

    def parts(self, rows: Tensor, weight: Weight) -> Tensor:
        """float32 [parts, n, N] that sum up, over the parts, to rows [n, K] times the transpose of `weight` [N, K]."""
        (num_columns, inner), tile = weight.shape, _tile_size(weight.shape[1])
        programs, tiles, count = triton.cdiv(num_columns, COLUMNS), triton.cdiv(inner, tile), 1
        while programs * count < self._least_programs and count < min(_MAX_PARTS, tiles // _MIN_TILES):
            count *= 2
        out = rows.new_empty((count, rows.shape[0], num_columns), dtype=torch.float32)
        self._launch(rows, weight, out, count, is_gated=False)
        return out

    def whole(self, rows: Tensor, weight: Weight) -> Tensor:
        """The product [n, N] in one part."""
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        self._launch(rows, weight, out, 1, is_gated=False)
        return out

    def gated(self, rows: Tensor, weight: Weight) -> Tensor:
        """silu of the first half of the columns times the second half: [n, N / 2]."""
        out = rows.new_empty(rows.shape[0], weight.shape[0] // 2)
        self._launch(rows, weight, out, 1, is_gated=True)
        return out

    def _launch(self, rows: Tensor, weight: Weight, out: Tensor, parts: int, *, is_gated: bool) -> None:
        (num_rows, inner), num_columns = rows.shape, out.shape[-1]
        numbers, scales = (weight, weight) if isinstance(weight, Tensor) else (weight.integers, weight.scales)
        tile, block = _tile_size(inner), 0 if numbers is scales else BLOCK
        shape = {"ROWS": num_rows, "COLUMNS": COLUMNS, "INNER": tile, "PARTS": parts, "BLOCK": block}
        shape |= {"IS_GATED": is_gated, "FETCHED": FETCHED, "LINE": min(_LINE_BYTES // numbers.element_size(), tile)}
        sizes = rows.element_size(), numbers.element_size()
        stages = num_stages(self._room, num_rows, tile, sizes, is_gated=is_gated)
        self._multiplied[(triton.cdiv(num_columns, COLUMNS), parts)](
            rows, numbers, scales, out, num_columns, inner, **shape, num_stages=stages, **self._options
        )

    def add_and_norm(self, hidden: Tensor, parts: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `parts` [parts, n, size], if any, to hidden [n, size] in place; return the RMS norm of the result."""
        (num_rows, size), normed = hidden.shape, torch.empty_like(hidden)
        count = 0 if parts is None else len(parts)
        shape = {"ROWS": num_rows, "PARTS": count, "BLOCK": triton.next_power_of_2(size)}
        self._normed[(num_rows,)](
            hidden, hidden if parts is None else parts, weight, normed, size, eps, **shape, num_warps=8, **self._options
        )
        return normed


def num_stages(room: int, num_rows: int, tile: int, sizes: tuple[int, int], *, is_gated: bool) -> int:
    """Tiles that fit `room` bytes of shared memory, in which a number of a row and of a weight has these bytes."""
    of_rows, of_numbers = sizes
    num_bytes = (COLUMNS * (1 + is_gated) * of_numbers + num_rows * of_rows) * tile
    return max(min(room // num_bytes, MAX_STAGES * of_rows // of_numbers), 1)


def _limits(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and shared memory per program in bytes; arbitrary values for interpreted kernels."""
    if device.type != "cuda":
        return 8, 2**16
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_block_optin


def _tile_size(inner: int) -> int:
    """The largest power of two up to INNER that divides `inner`."""
    return min(inner & -inner, INNER)
