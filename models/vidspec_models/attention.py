"""Grouped-query attention of one sequence against its cache, in shapes that keep rows bit-equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
        """The context that rows up to `length` attend over."""
        return -(-length // self._block) * self._block

    def rows(self, start: int, num_rows: int) -> Tensor:
        """[num_rows * group, context]: row i may look at 0..start+i; `group` equal lines a row ([1, context] for one).

        One row needs no lines of its own per head: attention broadcasts it.
        """
        context = self.padded(start + num_rows)
        last = self._zeros - (start + num_rows)  # where the line of the last row begins
        if num_rows == 1:
            return self._line[last : last + context][None]
        lines = self._line[last : last + context + num_rows - 1].unfold(0, context, 1).flip(0)
        return lines.repeat_interleave(self._group, 0)


def attend_from_start(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of a sequence's first n rows among themselves; half the work of a masked square.

    queries [n, H, D]; keys and values [1, KV, n, D]. Returns [n, H * D].
    """
    num_rows, num_heads, head_dim = queries.shape
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True, scale=scale
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
    out = functional.scaled_dot_product_attention(
        grouped.reshape(1, num_kv_heads, num_rows * group, head_dim), keys, values, attn_mask=mask, scale=scale
    )
    out = out.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return out.reshape(num_rows, num_heads * head_dim)
