"""A linear layer's weight as a quantised checkpoint stores it: small numbers, with a scale and a zero for each group.

So is a weight of any checkpoint if it is to have four bits.

A weight is (number - zero) * scale. It is converted some rows at a time, since all weights of a large model in 16 bits
would take four times the memory of its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_ROWS_AT_ONCE = 128  # they stay in the processor's cache
_FOUR_BITS, _MOST = 4, 15
_ATTRIBUTE = "quantised"


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [N, K] with groups of `width` columns, the last of which may have fewer."""

    shape: tuple[int, int]
    numbers: Callable[[slice], Tensor]  # [rows, K] of these rows, whose first is a multiple of 8
    scales: Tensor  # [N, groups]
    zeros: Tensor | None  # likewise
    width: int
    groups: Tensor | None = None  # [K], to which group each column belongs, if they are not in order
    bits: int = 8  # of a number

    def __getitem__(self, rows: slice) -> Quantised:
        """Some rows; the first is a multiple of 8."""
        first, last, _ = rows.indices(self.shape[0])
        return replace(
            self,
            shape=(last - first, self.shape[1]),
            numbers=lambda of: self.numbers(slice(first + of.start, first + of.stop)),
            scales=self.scales[first:last],
            zeros=None if self.zeros is None else self.zeros[first:last],
        )

    def weights(self, dtype: torch.dtype) -> Tensor:
        """All numbers [N, K]."""
        found = torch.empty(self.shape, dtype=dtype)
        for first in range(0, self.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            found[rows] = self[rows]._weights()
        return found

    def _weights(self) -> Tensor:
        numbers = self._numbers().float()
        if self.zeros is not None:
            numbers = numbers.sub_(self._for_columns(self.zeros.float()))
        return numbers.mul_(self._for_columns(self.scales.float()))

    def has_integers(self, block: int) -> bool:
        """Whether numbers less their zeros are integers that int8 holds, with one scale for each block of columns."""
        kind = self.numbers(slice(0, 8)).dtype
        if kind.is_floating_point or self.groups is not None or self.width % block or self.shape[1] % block:
            return False
        least = torch.iinfo(kind).min
        most = least + (1 << self.bits) - 1
        zeros = torch.zeros(1, dtype=torch.int16) if self.zeros is None else self.zeros.to(torch.int16)
        held = torch.iinfo(torch.int8)
        return bool(least - zeros.max() >= held.min and most - zeros.min() <= held.max)

    def integers(self, block: int) -> tuple[Tensor, Tensor]:
        """int8 [N, K], and scales float32 [N, K / block]; needs `has_integers`."""
        numbers, zeros, scales = self.by_block(block)
        return (numbers.to(torch.int16) - zeros.repeat_interleave(block, 1)).to(torch.int8), scales

    def by_block(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers [N, K], int16 zeros and float32 scales [N, K / block]; needs `has_integers`."""

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.width // block, 1)[:, : self.shape[1] // block]

        zeros = torch.zeros_like(self.scales) if self.zeros is None else self.zeros
        return self._numbers(), spread(zeros.to(torch.int16)), spread(self.scales.float())

    def _numbers(self) -> Tensor:
        return self.numbers(slice(0, self.shape[0])).contiguous()

    def _for_columns(self, values: Tensor) -> Tensor:
        """Each group's value for all of its columns: [N, K] of [N, groups]."""
        if self.groups is not None:
            return values.index_select(1, self.groups)
        return values.repeat_interleave(self.width, 1)[:, : self.shape[1]]


def round_to_four_bits(linears: Iterable[nn.Linear], width: int) -> None:
    """Give layers weights of four bits, with a scale and a zero for `width` successive weights of a row or more, unless
    they have such. Their parameters stay, and are read again when the numbers are.
    """
    for linear in linears:
        stored = quantised_weight(linear)
        if stored is None or stored.bits != _FOUR_BITS or not stored.has_integers(width):
            set_quantised(linear, _in_four_bits(stored or linear.weight.detach(), width))


def _in_four_bits(weight: Tensor | Quantised, width: int) -> Quantised:
    """A weight [N, K], K in whole groups. The least and the largest of a group's weights, or 0, become 0 and 15.

    Scales have the eight significant bits of a bfloat16, so that a number times its scale is exact in float32.
    """
    num_rows, num_columns = weight.shape

    def weights(rows: slice) -> Tensor:
        part = weight[rows]
        return part.float() if isinstance(part, Tensor) else part.weights(torch.float32)

    parts = [_grid(weights(slice(first, first + _ROWS_AT_ONCE)), width) for first in range(0, num_rows, _ROWS_AT_ONCE)]
    scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))

    def numbers(rows: slice) -> Tensor:
        groups: Tensor = weights(rows).unflatten(-1, (-1, width)) / scales[rows].unsqueeze(-1)
        groups = (groups.round_() + zeros[rows].unsqueeze(-1)).clamp_(0, _MOST)
        return groups.to(torch.uint8).flatten(-2)

    return Quantised((num_rows, num_columns), numbers, scales, zeros, width, bits=_FOUR_BITS)


def _grid(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Scales in float32 and whole zeros [n, K / width] of rows [n, K]."""
    groups = rows.unflatten(-1, (-1, width))
    least, largest = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    scales = ((largest - least) / _MOST).bfloat16().float()
    scales = scales.where(scales > 0, 1.0)
    return scales, (-least / scales).round_().clamp_(0, _MOST)


def quantised_weight(linear: Any) -> Quantised | None:
    """The weight of a layer that has one in a checkpoint's own form; its parameter is empty then."""
    found: Quantised | None = getattr(linear, _ATTRIBUTE, None)
    return found


def plain_weight(linear: nn.Linear) -> Tensor:
    """A layer's weight [N, K], converted if it is quantised."""
    stored = quantised_weight(linear)
    return linear.weight.detach() if stored is None else stored.weights(linear.weight.dtype)


def set_quantised(linear: nn.Linear, weight: Quantised) -> None:
    setattr(linear, _ATTRIBUTE, weight)


def make_plain(linear: nn.Linear, dtype: torch.dtype) -> None:
    """Convert a quantised weight of the layer to its parameter."""
    if (weight := quantised_weight(linear)) is not None:
        linear.weight = nn.Parameter(weight.weights(dtype), requires_grad=False)
        delattr(linear, _ATTRIBUTE)
