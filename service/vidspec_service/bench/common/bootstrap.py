"""Bootstrap intervals over groups (prompts or clips): how much of a figure could be the luck of the draw. Pure.

A group is drawn with everything that was measured on it, so what is compared stays paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_LEVEL = 0.95

Sums = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and the middle 95 % of its resamples; None for what is not finite, or cannot be drawn again."""

    value: float | None
    interval: tuple[float, float] | None


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
    """The figure of the groups' column sums. Resamples where it is not finite do not count; one group has none."""
    if not groups:
        return Estimate(value=None, interval=None)
    table = np.array(groups, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(table), size=(_RESAMPLES, len(table)))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(table.sum(axis=0)))
        found = figure(table[drawn].sum(axis=1))
    found = found[np.isfinite(found)]
    interval = None
    if len(table) > 1 and len(found):
        low, high = np.quantile(found, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
        interval = float(low), float(high)
    return Estimate(value=value if math.isfinite(value) else None, interval=interval)
