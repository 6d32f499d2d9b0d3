"""Grouped-query attention of one sequence against its cache, in a shape that keeps rows bit-equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def causal_mask(start: int, num_rows: int, block: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask of rows start..start+num_rows, `group` lines a row (one per query head of a KV head).

    [num_rows * group, context]: 0 where a row may look, -inf elsewhere. The context is padded to a multiple
    of `block`, see `row_invariance`.
    """
    context = -(-(start + num_rows) // block) * block
    columns = torch.arange(context, device=device)
    rows = torch.arange(start, start + num_rows, device=device).repeat_interleave(group)
    visible = columns[None, :] <= rows[:, None]
    return torch.zeros((), dtype=dtype, device=device).where(visible, float("-inf"))


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention; keys and values are read once for all rows and all heads of a group.

    queries [n, H, D]; keys and values [KV, capacity, D]; mask [n * H / KV, context]. Returns [n, H * D].
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, context = keys.shape[0], mask.shape[-1]
    group = num_heads // num_kv_heads
    grouped = queries.reshape(num_rows, num_kv_heads, group, head_dim).transpose(0, 1)
    out = functional.scaled_dot_product_attention(
        grouped.reshape(1, num_kv_heads, num_rows * group, head_dim),
        keys[None, :, :context],
        values[None, :, :context],
        attn_mask=mask,
        scale=scale,
    )
    out = out.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return out.reshape(num_rows, num_heads * head_dim)
