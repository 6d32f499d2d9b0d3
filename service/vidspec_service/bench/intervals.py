"""Intervals of time as (start, stop) pairs: union and covered length. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def covered_s(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(stop - start for start, stop in union(intervals))
