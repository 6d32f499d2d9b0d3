"""Bootstrap interval of a speed-up: how much of it could be the luck of the prompts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vidspec_service.bench.samples import Work

_RESAMPLES = 2000
_LEVEL = 0.95


def speedup_interval(ours: Mapping[int, Work], base: Mapping[int, Work]) -> tuple[float, float] | None:
    """The middle 95 % of the ratio of rates when groups are drawn again; None with fewer than two groups.

    A group is drawn with both of its measurements: they were taken next to each other, on the same prompts.
    """
    groups = sorted(group for group in ours if group in base)
    if len(groups) < 2:
        return None
    columns = np.array(
        [(ours[group].tokens, ours[group].seconds, base[group].tokens, base[group].seconds) for group in groups],
        dtype=np.float64,
    )
    drawn = np.random.default_rng(0).integers(len(groups), size=(_RESAMPLES, len(groups)))
    our_tokens, our_s, base_tokens, base_s = columns[drawn].sum(axis=1).T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (our_tokens / our_s) / (base_tokens / base_s)
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return None
    low, high = np.quantile(ratios, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return float(low), float(high)
