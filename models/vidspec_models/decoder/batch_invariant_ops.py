"""Batch-invariant operations: n rows computed together must give each row the bits it gets alone.

Without that a verification forward could pick another token than single-row decoding at a near-tie, and the text would
depend on how well the draft guesses. Matrix libraries choose kernels and summation orders by shape, so the property is
not free. Four rules about shapes restore it on every CPU seen so far:

* the form of the products (see `Product`);
* never fewer than `min_rows` rows in one (a single row may take another code path than two);
* attend over a context padded to a multiple of `context_block`, so that sums over it split alike;
* attend with a multiple of `attention_lines` query lines (MKL on AMD processors takes another kernel for few).

On CUDA a product's kernel is chosen by its number of rows at every step of that number, so rows are padded to one of
two sizes, or to one if even these two disagree; up to there a product's time is that of reading its weight.
`measure_invariance` finds out which rule a machine needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

AttendChunk = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # as `attend_causally`
_PACKING_ROWS = 8  # what the blocked layout is optimised for; any number of rows can be multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInvariance:
    """The rule about shapes that a decoder follows; `holds` says whether the measurement confirmed it."""

    is_packed: bool = False  # the products' form, see `Product`
    max_inner: int | None = None
    min_rows: int
    context_block: int
    attention_lines: int = 1
    row_buckets: tuple[int, ...] = ()  # ascending; a smaller number of rows is padded to the next of them
    attend_chunk: AttendChunk | None = None  # of a prompt's rows, whose bits nobody compares; None: torch's
    holds: bool

    def padded(self, num_rows: int) -> int:
        """Rows that a product is made for where `num_rows` are wanted."""
        return next((size for size in self.row_buckets if size >= num_rows), max(num_rows, self.min_rows))

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [n, K] with the last one repeated up to the number that a product is made for."""
        missing = self.padded(rows.shape[0]) - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows[-1:].expand(missing, -1)))

    def product(self, weight: Tensor) -> Product:
        """Of a linear weight [N, K], in the rule's form."""
        return Product(weight, is_packed=self.is_packed, max_inner=self.max_inner)


class Product:
    """rows [n, K] times the transpose of a linear weight [N, K], in one of two forms.

    *Packed*: oneDNN's blocked layout, made once; measured on a CPU without AMX it reads a streamed weight as fast as
    one row can and makes 9 rows for 1.2 times the price of one, bit-equal at every row count. *Plain*: the weight as
    [K, N] (on a CPU transposed in memory) for an ordinary product, where sums longer than `max_inner` are made piece
    by piece.
    """

    def __init__(self, weight: Tensor, *, is_packed: bool = False, max_inner: int | None = None) -> None:
        self._packed: Tensor | None = None
        self._pieces: tuple[Tensor, ...] = ()
        self._max_inner = max_inner or weight.shape[1]
        if is_packed:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
        else:
            # CUDA's libraries read a stored weight in either direction: no copy of it is needed.
            self._pieces = (weight.t() if weight.is_cuda else weight.t().contiguous()).split(self._max_inner)

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """[n, N], plus a bias [N]."""
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
            return result
        return self._plain(rows, bias)

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """residual [n, N] plus the product, [n, N]."""
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._packed, None, "add")
            return result
        return self._plain(rows, residual)

    def _plain(self, rows: Tensor, start: Tensor | None) -> Tensor:
        if len(self._pieces) == 1:
            weight = self._pieces[0]
            return torch.mm(rows, weight) if start is None else torch.addmm(start, rows, weight)
        for piece, weight in zip(rows.split(self._max_inner, dim=-1), self._pieces, strict=True):
            start = torch.mm(piece, weight) if start is None else torch.addmm(start, piece, weight)
        assert start is not None
        return start


def rms_norm(hidden: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of [n, hidden], in few operations.

    eps is from `eps_operand`, a [1, 1, 1] tensor, so that mean and addition are one batched product. Narrow types and
    CUDA take torch's own kernel, which sums in float32.
    """
    if hidden.dtype is not torch.float32 or hidden.is_cuda:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, float(eps))
    size = hidden.shape[-1]
    power = torch.baddbmm(eps, hidden.unsqueeze(1), hidden.unsqueeze(2), alpha=1.0 / size)  # [n, 1, 1]
    return (hidden * power.rsqrt_().squeeze(2)).mul_(weight)


def eps_operand(eps: float) -> Tensor:
    """The number as `rms_norm` takes it; on the CPU, so that nothing ever waits for a device to tell it."""
    return torch.full((1, 1, 1), eps)


class CausalMasks:
    """Additive causal masks as views of one line: zeros, then -inf. The context is padded to a multiple of `block`,
    the lines to one of `lines`."""

    def __init__(
        self, max_context: int, block: int, group: int, dtype: torch.dtype, device: torch.device, lines: int = 1
    ) -> None:
        self._block = block
        self._group = group
        self._lines = lines
        self._zeros = -(-max_context // block) * block
        line = torch.zeros(2 * self._zeros, dtype=dtype, device=device)
        line[self._zeros :] = float("-inf")
        self._line = line

    def padded(self, length: int) -> int:
        """The context that rows up to `length` attend over."""
        return -(-length // self._block) * self._block

    def rows(self, start: int, num_rows: int) -> Tensor:
        """[lines, context]: row i may look at 0..start+i; `group` equal lines a row, the last repeated as padding.

        One row without padding is a single line: attention broadcasts it.
        """
        num_lines = self._padded_lines(num_rows)
        context = self.padded(start + num_rows)
        last = self._zeros - (start + num_rows)  # where the line of the last row begins
        if num_rows == 1:
            line = self._line[last : last + context][None]
            line = line.clone() if line.is_cuda else line  # kernels there read masks in aligned pieces
            return line if num_lines == self._group else line.expand(num_lines, -1)
        lines = self._line[last : last + context + num_rows - 1].unfold(0, context, 1).flip(0)
        lines = lines.repeat_interleave(self._group, 0)
        missing = num_lines - len(lines)
        return lines if missing == 0 else torch.cat((lines, lines[-1:].expand(missing, -1)))

    def _padded_lines(self, num_rows: int) -> int:
        return -(-num_rows * self._group // self._lines) * self._lines

    def num_skipped(self, num_hidden: int) -> int:
        """Of so many hidden rows at the front, those that fill whole blocks: attention starts behind them."""
        return num_hidden // self._block * self._block

    def beyond(self, mask: Tensor, num_hidden: int) -> Tensor:
        """A mask of `rows` for a context without its skipped rows; the other hidden ones are closed.

        By a large number instead of -inf: a kernel that meets nothing but -inf in its first part would make a NaN.
        """
        skipped = self.num_skipped(num_hidden)
        closed = mask[:, skipped:].clone()
        closed[:, : num_hidden - skipped] = torch.finfo(mask.dtype).min / 4
        return closed


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of a sequence's last n rows, without a mask in memory; on CUDA torch's flash kernel.

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
    missing = mask.shape[0] - num_rows * group  # below 0: a single line for all
    if missing > 0:
        lines = functional.pad(lines, (0, 0, 0, missing))
    out = functional.scaled_dot_product_attention(lines, keys, values, attn_mask=mask, scale=scale)
    out = out[0, :, : num_rows * group].reshape(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return out.reshape(num_rows, num_heads * head_dim)
