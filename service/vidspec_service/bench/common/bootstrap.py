"""Bootstrap intervals over groups (prompts or clips): how much of a figure could be the luck of the draw. Pure.

A group is drawn with everything that was measured on it, so what is compared stays paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_LEVEL = 0.95

Sums = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and the middle 95 % of its resamples."""

    value: float
    low: float
    high: float


def rate(sums: Sums) -> Sums:
    """Of sums [..., 2]: the first over the second."""
    found: Sums = sums[..., 0] / sums[..., 1]
    return found


def ratio(sums: Sums) -> Sums:
    """Of sums [..., 4]: the first two's rate over that of the last two."""
    return rate(sums[..., :2]) / rate(sums[..., 2:])


def difference(sums: Sums) -> Sums:
    """Of sums [..., 4]: the first two's rate less that of the last two."""
    return rate(sums[..., :2]) - rate(sums[..., 2:])


def estimate(figure: Callable[[Sums], Sums], groups: Sequence[Sequence[float]]) -> Estimate:
    """The figure of the groups' column sums. Resamples where it is not finite do not count; with none left, a point."""
    table = np.array(groups, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(table), size=(_RESAMPLES, len(table)))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(table.sum(axis=0)))
        found = figure(table[drawn].sum(axis=1))
    found = found[np.isfinite(found)]
    if not len(found):
        return Estimate(value=value, low=value, high=value)
    low, high = np.quantile(found, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Estimate(value=value, low=float(low), high=float(high))
