"""Bootstrap confidence intervals over groups (prompts or clips). Pure.

A group is resampled together with everything measured on it, so that comparisons stay paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_LEVEL = 0.95

Sums = NDArray[np.float64]
Counts = Mapping[int, tuple[float, float]]  # group to what a rate divides, such as tokens and seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and its 95 % bootstrap interval. None: the value is not finite, or there is nothing to resample."""

    value: float | None
    interval: tuple[float, float] | None


def whiskers(value: float, interval: tuple[float, float] | None) -> tuple[float, float]:
    """How far an interval extends below and above its figure, for plots."""
    low, high = interval or (value, value)
    return max(value - low, 0.0), max(high - value, 0.0)


def rate(sums: Sums) -> Sums:
    """For sums [..., 2]: the first divided by the second."""
    found: Sums = sums[..., 0] / sums[..., 1]
    return found


def ratio(sums: Sums) -> Sums:
    """For sums [..., 4]: the rate of the first two divided by the rate of the last two."""
    return rate(sums[..., :2]) / rate(sums[..., 2:])


def difference(sums: Sums) -> Sums:
    """For sums [..., 4]: the rate of the first two minus the rate of the last two."""
    return rate(sums[..., :2]) - rate(sums[..., 2:])


def estimate(figure: Callable[[Sums], Sums], groups: Sequence[Sequence[float]]) -> Estimate:
    """`figure` of the groups' column sums. Resamples that are not finite are dropped; one group has no interval."""
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


def paired(figure: Callable[[Sums], Sums], ours: Counts, base: Counts) -> Estimate:
    """Estimate a figure of two rates, such as their ratio, over the groups that both have."""
    return estimate(figure, [(*ours[group], *base[group]) for group in sorted(ours.keys() & base.keys())])
