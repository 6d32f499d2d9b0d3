"""HIPPO's choice of cells: where they stand out, where the text looks, and which good ones differ from each other.

HIPPO (arXiv 2601.08273) fuses attention with signals of its own in time and space. Of its formulas only that of
attention is public (see `TextQueries`); these are ours (docs/methods.md).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.preservation.selection import Candidates, best, with_even

# HIPPO's shares, chosen on validation clips (docs/methods.md).
_DISTINCT_SHARE = 0.05  # of quality; the rest is relevance
_PLACE_POWER = 0.1
_EVEN_SHARE = 0.1  # of the budget

_CLIP_QUANTILE = 0.995  # attention sinks
_POOL = 3  # budgets: cells beyond are too poor to be chosen; they would only cost time
_MOST_STEPS = 256  # one cell each; the rest of a larger budget is chosen at once
_RESERVE = 1e-3  # of the best cell's worth, left to a cell that others show completely
_FADING = 0.78  # of what a cell shows, for each frame between: that a thing is still there must be seen, too
_LEAST = 1e-6  # below it what is left is rounding
_VALUES_AT_ONCE = 2**18  # of cells that are compared: a megabyte stays in a processor's cache

AROUND = tuple(product((-1, 0, 1), (-1, 0, 1)))  # steps down and right, to a place itself, too


def hippo(cells: Candidates) -> Tensor:
    """Ours after HIPPO (arXiv 2601.08273): what the text looks at and what stands out, each less what cells chosen near
    it show. Without relevance distinctiveness is all there is.
    """
    units = centred(cells.features)
    quality = ranks(spatial_distinctiveness(units, cells))
    if cells.relevance is not None:
        relevance = relative(debiased(cells.relevance, cells, _PLACE_POWER))
        quality = _DISTINCT_SHARE * quality + (1 - _DISTINCT_SHARE) * relevance
    num_diverse = cells.budget - int(_EVEN_SHARE * cells.budget)
    return with_even(diverse(quality, units, cells.times[cells.frames], num_diverse), cells.num_cells, cells.budget)


def centred(features: Tensor) -> Tensor:
    """[C, hidden] less the video's mean, each of unit length, float32.

    Without centring the part that all cells share rules every cosine, and the mean of a neighbourhood is ruled by
    its objects: what looks distinct then is the background beside them.
    """
    features = features.float()
    return functional.normalize(features - features.mean(0), dim=-1)


def cosines(units: Tensor, others: Tensor) -> Tensor:
    """float32 [D, C]: of each of `units` [C, hidden] with D others of them, whose numbers are int64 [D, C]."""
    at_once = max(1, _VALUES_AT_ONCE // (others.shape[0] * units.shape[1]))
    parts = zip(units.split(at_once), others.split(at_once, 1), strict=True)
    return torch.cat([torch.linalg.vecdot(mine, functional.embedding(theirs, units)) for mine, theirs in parts], 1)


def spatial_distinctiveness(units: Tensor, cells: Candidates) -> Tensor:
    """float32 [C]: 1 - the mean cosine with the (at most 8) cells around it in its frame; 1 where there are none."""
    others, are_there = cells.beside(cells.frames, AROUND[:4])  # the other four: whose other it is
    alike = cosines(units, others).masked_fill(~are_there, 0.0)
    total = torch.zeros_like(units[:, 0])
    for cosine in alike:
        total += cosine
    for other, cosine in zip(others.flip(0), alike.flip(0), strict=True):
        total.index_add_(0, other, cosine)
    count = are_there.sum(0) + others[are_there].bincount(minlength=cells.num_cells)
    return 1.0 - total / count.clamp(min=1)


def ranks(scores: Tensor) -> Tensor:
    """[C] to [0, 1] by place in the order, equal scores sharing the mean of their places; 0.5 for a single one."""
    if len(scores) < 2:
        return torch.full_like(scores, 0.5)
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    places = (2 * last - counts - 1).to(scores.dtype) / 2
    ranked: Tensor = places[inverse] / (len(scores) - 1)
    return ranked


def relative(scores: Tensor) -> Tensor:
    """Square root of each of [C] over the largest, in [0, 1]: a long tail shortened, outliers kept apart."""
    return (scores / scores.max().clamp(min=1e-12)).sqrt()


def debiased(relevance: Tensor, cells: Candidates, power: float) -> Tensor:
    """Attention [C] divided by what its frame and its place get on average, both to a power, and clipped.

    Places that draw attention whatever they show (borders, first and last frames) get the same in every frame; what
    stays is attention to content. A power below 1, because part of a frame's or a place's share is content, too.
    """
    frame = _relative_means(relevance, cells.frames, cells.num_frames).pow(power)
    slot = _relative_means(relevance, cells.slots, cells.shape[0] * cells.shape[1]).pow(power)
    found = relevance / (frame * slot)
    return found.clamp(max=float(torch.quantile(found, _CLIP_QUANTILE)))


def _relative_means(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[C]: the mean score of each cell's group, over the mean of all; 1 where nothing is scored at all."""
    counts = torch.bincount(groups, minlength=num_groups).clamp(min=1)
    means = scores.new_zeros(num_groups).index_add(0, groups, scores) / counts
    whole = scores.mean()
    relative = means / whole if whole > 0 else torch.ones_like(means)
    return relative.clamp(min=1e-3)[groups]


def diverse(quality: Tensor, units: Tensor, times: Tensor, budget: int) -> Tensor:
    """Indices of `budget` of the C cells: greedy maximum of a determinant (Chen et al., NeurIPS 2018).

    quality [C] in [0, 1]; units [C, hidden] of unit length; times int64 [C], in frames. With L(i, j) = quality(i)
    quality(j) max(0, cos(i, j)) 0.78^|frames between| the determinant of the rows and columns chosen is a product over
    the cells: of what is left of each one's squared quality when all that the cells before it show is taken away. The
    next cell is the one with most left.
    """
    pool = best(quality, _POOL * budget)
    quality, units, times = quality[pool], units[pool], times[pool].to(quality.dtype)
    num_steps = min(budget, _MOST_STEPS)
    if quality.device.type == "cpu":  # numpy's overhead is half of torch's, and a step is little else
        shown = np.zeros((num_steps, len(pool)), np.float32)
        chosen, left = _greedy(quality.numpy(), units.numpy(), times.numpy(), shown)
    else:
        chosen, left = _greedy(quality, units, times, quality.new_zeros(num_steps, len(pool)))
    rest = best(torch.as_tensor(left), budget - len(chosen))
    return pool[torch.cat((pool.new_tensor(chosen), rest))]


def _greedy(quality: Any, units: Any, times: Any, shown: Any) -> tuple[list[int], Any]:
    """The cells chosen, at most one for each row of `shown` (zeros), and what is left of the others. Any arrays."""
    left = quality**2 + _RESERVE
    chosen: list[int] = []
    for step in range(len(shown)):
        cell = int(left.argmax())
        if left[cell] < _LEAST:
            break
        shared = quality[cell] * quality * (units @ units[cell]).clip(0.0) * _FADING ** abs(times - times[cell])
        shown[step] = (shared - shown[:step, cell] @ shown[:step]) / left[cell] ** 0.5
        left = (left - shown[step] ** 2).clip(0.0)
        chosen.append(cell)
        left[chosen] = -1.0
    return chosen, left
