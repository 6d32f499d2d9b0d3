"""Weights of eight bits on a GPU: half the memory, and half the bytes that a step reads.

Only weights are rounded. They are converted where they are multiplied, so results have the bits of a model with the
converted weights: `CudaProducts` converts in registers, for a step's few rows; `Int8Product` all of a weight before a
product, for a prompt's rows, next to which that takes little time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vidspec_models.decoder.batch_invariant_ops import Product
from vidspec_models.decoder.int8 import BLOCK, integers_of
from vidspec_models.decoder.quantised import quantised_weight

_ROWS_AT_ONCE = 4096  # to round a large head at once would need several times its memory


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [N, K]: integers times a scale for each block of 64 in a row."""

    integers: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N, K / 64]

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    def converted(self, dtype: torch.dtype) -> Tensor:
        """All weights [N, K], each rounded once."""
        blocks = self.integers.unflatten(1, (-1, BLOCK))
        out = torch.empty(blocks.shape, dtype=dtype, device=blocks.device)
        return torch.mul(blocks, self.scales.unsqueeze(-1), out=out).flatten(1)


class Int8Product(Product):
    """The product with a weight of eight bits."""

    def __init__(self, weight: Int8Weight, max_inner: int | None = None) -> None:
        self._weight, self._max_inner = weight, max_inner or weight.shape[1]

    @property
    def weight(self) -> Int8Weight:
        """The weight as it is stored."""
        return self._weight

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `Product`."""
        return Product(self._weight.converted(rows.dtype), self._max_inner)(rows, bias)


def int8_weight(linears: Sequence[nn.Linear], device: torch.device) -> Int8Weight:
    """The weights of these layers, one below the other, rounded unless a quantised checkpoint's own integers fit."""
    pieces = [piece for linear in linears for piece in _pieces(linear, device)]
    integers, scales = zip(*pieces, strict=True)
    return Int8Weight(torch.cat(integers), torch.cat(scales))


def _pieces(linear: nn.Linear, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    stored = quantised_weight(linear) or linear.weight.detach()
    parts = [stored[first : first + _ROWS_AT_ONCE] for first in range(0, stored.shape[0], _ROWS_AT_ONCE)]
    moved = [part.to(device) if isinstance(part, Tensor) else part for part in parts]
    return [(integers.to(device), scales.to(device)) for integers, scales in map(integers_of, moved)]
