"""Product: a matrix product with a weight, cut along the inner dimension where long sums are not row-invariant."""

from __future__ import annotations

import torch
from torch import Tensor


class Product:
    """rows [n, K] times a stored weight [K, N]. Sums longer than `max_inner` are made piece by piece, in order."""

    def __init__(self, weight: Tensor, max_inner: int | None = None) -> None:
        self._max_inner = max_inner if max_inner is not None and max_inner < weight.shape[0] else None
        self._weights = [weight] if self._max_inner is None else list(weight.split(self._max_inner))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The stored pieces, each [K_i, N]."""
        return tuple(self._weights)

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """[n, N]; `bias` is [N] or, for a residual connection, [n, N]."""
        if self._max_inner is None:
            weight = self._weights[0]
            return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        pieces = rows.split(self._max_inner, dim=-1)
        first = self._weights[0]
        total = torch.mm(pieces[0], first) if bias is None else torch.addmm(bias, pieces[0], first)
        for piece, weight in zip(pieces[1:], self._weights[1:], strict=True):
            total = torch.addmm(total, piece, weight)
        return total
