"""Acceptance over clips with bootstrap intervals. Clips are drawn again whole: what is asked of one hangs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_LEVEL = 0.95

Counts = Mapping[int, tuple[int, int]]  # clip to (accepted, judged)
_Figure = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # sums [..., numbers] to figures [...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and the middle 95 % of its resamples."""

    value: float
    low: float
    high: float


def rate(counts: Counts) -> Estimate:
    """Accepted over judged."""
    return _estimate(lambda sums: sums[..., 0] / sums[..., 1], counts)


def ratio(ours: Counts, base: Counts) -> Estimate:
    """Our rate over the base's, clip by clip paired."""
    return _estimate(lambda sums: (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3]), ours, base)


def difference(ours: Counts, base: Counts) -> Estimate:
    """Our rate less the base's, clip by clip paired."""
    return _estimate(lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3], ours, base)


def _estimate(figure: _Figure, *counts: Counts) -> Estimate:
    clips = sorted(set(counts[0]).intersection(*counts[1:]))
    table = np.array([[number for each in counts for number in each[clip]] for clip in clips], dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(clips), size=(_RESAMPLES, len(clips)))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(table.sum(axis=0)))
        found = figure(table[drawn].sum(axis=1))
    found = found[np.isfinite(found)]
    if not len(found):
        return Estimate(value=value, low=value, high=value)
    low, high = np.quantile(found, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Estimate(value=value, low=float(low), high=float(high))


def added(counts: Sequence[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """(clip, accepted, judged) of many prompts, summed by clip."""
    sums: dict[int, tuple[int, int]] = {}
    for clip, accepted, judged in counts:
        before = sums.get(clip, (0, 0))
        sums[clip] = (before[0] + accepted, before[1] + judged)
    return sums
