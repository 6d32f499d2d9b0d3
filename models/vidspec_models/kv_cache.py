"""One request's keys and values: append rows, truncate to a length. Rollback is moving one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """What a cache of one model looks like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    context_block: int  # capacity and attended length are multiples of this (see `row_invariance`)

    def bytes_per_token(self) -> int:
        """Keys and values of one position over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Contiguous keys and values of one sequence.

    Rows at or beyond `length` are stale and masked by every reader; storage starts as zeros so that a
    masked row can never bring in a NaN.
    """

    def __init__(self, geometry: CacheGeometry, max_tokens: int) -> None:
        block = geometry.context_block
        self.capacity = -(-max_tokens // block) * block
        self.length = 0
        shape = (geometry.num_layers, 1, geometry.num_kv_heads, self.capacity, geometry.head_dim)
        self.keys = torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)  # [L, 1, KV, capacity, D]
        self.values = torch.zeros_like(self.keys)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} rows to {length}")
        self.length = length
