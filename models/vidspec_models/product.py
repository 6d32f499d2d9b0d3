"""Product: rows times a linear weight, in a form whose bits do not depend on how many rows are multiplied together.

Two forms. *Packed*: oneDNN's blocked layout, made once; measured on a CPU without AMX it reads a streamed weight as
fast as one row can and makes 9 rows for 1.2 times the price of one, bit-equal at every row count. *Plain*: the
weight as [K, N] (on a CPU transposed in memory) for an ordinary product, where sums longer than `max_inner` are made
piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PACKING_ROWS = 8  # what the blocked layout is optimised for; any number of rows can be multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductForm:
    """How weights are stored and multiplied."""

    is_packed: bool
    max_inner: int | None = None  # plain form only; None: any length


class Product:
    """rows [n, K] times the transpose of a linear weight [N, K]."""

    def __init__(self, weight: Tensor, form: ProductForm) -> None:
        self._packed: Tensor | None = None
        self._pieces: tuple[Tensor, ...] = ()
        self._max_inner = form.max_inner or weight.shape[1]
        if form.is_packed:
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


def can_pack(weight: Tensor) -> bool:
    """Whether this build, device and type have the packed form."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        Product(weight[:1], ProductForm(is_packed=True))(weight[:1])
    except (RuntimeError, AttributeError):  # an operator of this name is not promised by torch
        return False
    return True
