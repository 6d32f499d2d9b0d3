"""Grouped-query attention of one sequence against its cache, in shapes that keep rows bit-equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

AttendChunk = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # as `attend_causally`


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
