"""HIPPO's choice of cells: distinct ones that the text attends to, and among these such as differ from each other.

HIPPO (arXiv 2601.08273) combines attention with signals of its own in time and space. Of its formulas only that of
attention is public (see `TextQueries`); the others are our own (docs/methods.md).
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
_POOL = 3  # the best 3 budgets of cells are considered; others are too poor to be chosen and would only cost time
_MOST_STEPS = 256  # greedy steps of one cell each; the rest of a larger budget is chosen in one go
_RESERVE = 1e-3  # of the best cell's worth: remains for a cell whose content others show completely
_FADING = 0.78  # factor on the similarity for each frame between: that a thing is still there must be seen, too
_LEAST = 1e-6  # a smaller remainder is rounding error
_VALUES_AT_ONCE = 2**18  # feature values compared at once: a megabyte stays in a processor's cache

AROUND = tuple(product((-1, 0, 1), (-1, 0, 1)))  # steps (down, right) to the 3 x 3 places around and at a cell


def hippo(cells: Candidates) -> Tensor:
    """Our version of HIPPO (arXiv 2601.08273): relevance to the text and distinctiveness, each less what cells chosen
    nearby already show. Without relevance, distinctiveness alone counts.
    """
    units = centred(cells.features)
    quality = ranks(spatial_distinctiveness(units, cells))
    if cells.relevance is not None:
        relevance = relative(debiased(cells.relevance, cells, _PLACE_POWER))
        quality = _DISTINCT_SHARE * quality + (1 - _DISTINCT_SHARE) * relevance
    num_diverse = cells.budget - int(_EVEN_SHARE * cells.budget)
    return with_even(diverse(quality, units, cells.times[cells.frames], num_diverse), cells.num_cells, cells.budget)


def centred(features: Tensor) -> Tensor:
    """[C, hidden] minus the mean of all cells, each then scaled to unit length, float32.

    Without centring, the component that all cells share dominates every cosine, and objects dominate the mean of their
    neighbourhood: then the background beside them looks distinct.
    """
    features = features.float()
    return functional.normalize(features - features.mean(0), dim=-1)


def cosines(units: Tensor, others: Tensor) -> Tensor:
    """float32 [D, C]: cosines of each of `units` [C, hidden] with D others, numbered by `others` int64 [D, C]."""
    at_once = max(1, _VALUES_AT_ONCE // (others.shape[0] * units.shape[1]))
    parts = zip(units.split(at_once), others.split(at_once, 1), strict=True)
    return torch.cat([torch.linalg.vecdot(mine, functional.embedding(theirs, units)) for mine, theirs in parts], 1)


def spatial_distinctiveness(units: Tensor, cells: Candidates) -> Tensor:
    """float32 [C]: 1 - the mean cosine with the at most 8 neighbours in the cell's frame; 1 if there are none."""
    others, are_there = cells.beside(cells.frames, AROUND[:4])  # the other four follow by symmetry
    alike = cosines(units, others).masked_fill(~are_there, 0.0)
    total = torch.zeros_like(units[:, 0])
    for cosine in alike:
        total += cosine
    for other, cosine in zip(others.flip(0), alike.flip(0), strict=True):
        total.index_add_(0, other, cosine)
    count = are_there.sum(0) + others[are_there].bincount(minlength=cells.num_cells)
    return 1.0 - total / count.clamp(min=1)


def ranks(scores: Tensor) -> Tensor:
    """Ranks of [C] scaled to [0, 1]; equal scores share the mean of their ranks; 0.5 for a single score."""
    if len(scores) < 2:
        return torch.full_like(scores, 0.5)
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    places = (2 * last - counts - 1).to(scores.dtype) / 2
    ranked: Tensor = places[inverse] / (len(scores) - 1)
    return ranked


def relative(scores: Tensor) -> Tensor:
    """Square root of each of [C] divided by the largest, in [0, 1]: shortens a long tail, keeps outliers apart."""
    return (scores / scores.max().clamp(min=1e-12)).sqrt()


def debiased(relevance: Tensor, cells: Candidates, power: float) -> Tensor:
    """Attention [C] divided by the averages of its frame and of its place, both raised to a power, and clipped.

    This removes attention that frames and places get whatever they show (borders, first and last frames) and leaves
    attention to content. The power is below 1, because part of a frame's or a place's average is content, too.
    """
    frame = _relative_means(relevance, cells.frames, cells.num_frames).pow(power)
    slot = _relative_means(relevance, cells.slots, cells.shape[0] * cells.shape[1]).pow(power)
    found = relevance / (frame * slot)
    return found.clamp(max=float(torch.quantile(found, _CLIP_QUANTILE)))


def _relative_means(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[C]: the mean score of each cell's group divided by the mean of all scores; 1 if all scores are 0."""
    counts = torch.bincount(groups, minlength=num_groups).clamp(min=1)
    means = scores.new_zeros(num_groups).index_add(0, groups, scores) / counts
    whole = scores.mean()
    relative = means / whole if whole > 0 else torch.ones_like(means)
    return relative.clamp(min=1e-3)[groups]


def diverse(quality: Tensor, units: Tensor, times: Tensor, budget: int) -> Tensor:
    """Indices of `budget` of the C cells: greedy maximum of a determinant (Chen et al., NeurIPS 2018).

    quality [C] in [0, 1]; units [C, hidden] of unit length; times int64 [C], in frames. Let L(i, j) = quality(i)
    quality(j) max(0, cos(i, j)) 0.78^|frames between|. The determinant of the chosen rows and columns is a product over
    the chosen cells: each factor is the part of the cell's squared quality that the cells chosen before do not show.
    Each step chooses the cell with the largest remaining part.
    """
    pool = best(quality, _POOL * budget)
    quality, units, times = quality[pool], units[pool], times[pool].to(quality.dtype)
    num_steps = min(budget, _MOST_STEPS)
    if quality.device.type == "cpu":  # numpy's call overhead is half of torch's, and dominates a step
        shown = np.zeros((num_steps, len(pool)), np.float32)
        chosen, left = _greedy(quality.numpy(), units.numpy(), times.numpy(), shown)
    else:
        chosen, left = _greedy(quality, units, times, quality.new_zeros(num_steps, len(pool)))
    rest = best(torch.as_tensor(left), budget - len(chosen))
    return pool[torch.cat((pool.new_tensor(chosen), rest))]


def _greedy(quality: Any, units: Any, times: Any, shown: Any) -> tuple[list[int], Any]:
    """The chosen cells, at most one per row of `shown` (zeros), and the remainders of the others. NumPy or torch."""
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
