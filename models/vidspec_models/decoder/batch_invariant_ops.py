"""Batch-invariant operations: n rows computed together must give each row the bits that it gets alone.

Otherwise a verification forward could choose another token than single-row decoding at a near-tie, and the text would
depend on how well the draft guesses. Matrix libraries choose kernels and summation orders by shape, so the property is
not automatic: `measure_invariance` finds out which rule about shapes a machine needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

AttendChunk = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # signature of `attend_causally`


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInvariance:
    """The rule about shapes that a decoder follows; `holds` says whether the measurement confirmed it."""

    is_packed: bool = False  # form of the products, see `product_of`
    max_inner: int | None = None
    min_rows: int
    context_block: int
    attends_alone: bool = False  # each row of a step attends by itself
    row_buckets: tuple[int, ...] = ()  # ascending; the number of rows is padded to the next bucket
    attend_chunk: AttendChunk | None = None  # for a prompt's rows, whose bits are never compared; None: torch's
    cache_dtype: torch.dtype | None = None  # of keys and values; None: the weights' type
    holds: bool

    def padded(self, num_rows: int) -> int:
        """The number of rows to compute a product for if `num_rows` are needed."""
        return next((size for size in self.row_buckets if size >= num_rows), max(num_rows, self.min_rows))

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [n, K] with the last one repeated up to the number that a product is computed for."""
        missing = self.padded(rows.shape[0]) - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows[-1:].expand(missing, -1)))


class Product:
    """rows [n, K] times the transpose of a linear weight [N, K], held as [K, N] (on a CPU transposed in memory).

    Sums longer than `max_inner` are computed in pieces.
    """

    def __init__(self, weight: Tensor, max_inner: int | None = None) -> None:
        self._max_inner = max_inner or weight.shape[1]
        # CUDA's libraries can read a transposed weight: no copy is needed.
        self._pieces = (weight.t() if weight.is_cuda else weight.t().contiguous()).split(self._max_inner)

    @property
    def weight(self) -> Any:
        """The weight [N, K] of a product in one piece, for a kernel of our own; no copy on CUDA."""
        piece: Tensor
        (piece,) = self._pieces
        return piece.t().contiguous()

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product [n, N], plus a bias [N] if given."""
        if len(self._pieces) == 1:
            weight = self._pieces[0]
            return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        total = bias
        for piece, weight in zip(rows.split(self._max_inner, dim=-1), self._pieces, strict=True):
            total = torch.mm(piece, weight) if total is None else torch.addmm(total, piece, weight)
        assert total is not None
        return total

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """residual [n, N] plus the product, [n, N]."""
        return self(rows, residual)


def rms_norm(hidden: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of [n, hidden], in few operations.

    eps is a [1, 1, 1] tensor on the CPU: so mean and addition are one batched product, and reading eps never waits for
    a device. Narrow types and CUDA use torch's own kernel, which sums in float32.
    """
    if hidden.dtype is not torch.float32 or hidden.is_cuda:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, float(eps))
    size = hidden.shape[-1]
    power = torch.baddbmm(eps, hidden.unsqueeze(1), hidden.unsqueeze(2), alpha=1.0 / size)  # [n, 1, 1]
    return (hidden * power.rsqrt_().squeeze(2)).mul_(weight)


class CausalMasks:
    """Additive causal masks as views of one line: zeros, then -inf. The context is padded to a multiple of `block`."""

    def __init__(self, max_context: int, block: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block = block
        self._group = group
        self._zeros = -(-max_context // block) * block
        line = torch.zeros(2 * self._zeros, dtype=dtype, device=device)
        line[self._zeros :] = float("-inf")
        self._line = line

    def padded(self, length: int) -> int:
        """The context length that rows up to `length` attend to."""
        return -(-length // self._block) * self._block

    def rows(self, start: int, num_rows: int) -> Tensor:
        """[lines, context]: row i may attend to 0..start+i; `group` equal lines per row.

        One row is a single line, which attention broadcasts.
        """
        context = self.padded(start + num_rows)
        last = self._zeros - (start + num_rows)  # where the line of the last row begins
        if num_rows == 1:
            line = self._line[last : last + context][None]
            return line.clone() if line.is_cuda else line  # CUDA kernels read masks in aligned pieces
        lines = self._line[last : last + context + num_rows - 1].unfold(0, context, 1).flip(0)
        return lines.repeat_interleave(self._group, 0)


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of a sequence's last n rows, without a mask tensor; on CUDA torch's flash kernel.

    queries [n, H, D]; keys and values [1, KV, context, D], context n or more. Returns [n, H * D].
    """
    num_rows, num_heads, head_dim = queries.shape
    is_whole = keys.shape[2] == num_rows
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=None if is_whole else causal_lower_right(num_rows, keys.shape[2]),
        is_causal=is_whole,
        enable_gqa=True,
        scale=scale,
    )
    return out[0].transpose(0, 1).reshape(num_rows, num_heads * head_dim)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention; keys and values are read once for all rows and all heads of a group.

    queries [n, H, D]; keys and values [1, KV, context, D]; mask from `CausalMasks`. Returns [n, H * D].
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    grouped = queries.reshape(num_rows, num_kv_heads, group, head_dim).transpose(0, 1)
    lines = grouped.reshape(1, num_kv_heads, num_rows * group, head_dim)
    out = functional.scaled_dot_product_attention(lines, keys, values, attn_mask=mask, scale=scale)
    out = out.reshape(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return out.reshape(num_rows, num_heads * head_dim)
