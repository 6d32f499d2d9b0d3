"""HIPPO's choice of cells: distinct cells that the text attends to and that differ from each other.

HIPPO (arXiv 2601.08273) combines attention with signals of its own in time and space. Of its formulas only that of
attention is public (see `TextQueries`); the others are our own (docs/methods.md).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.preservation.selection import Candidates, filled_evenly, top_indices

Floats = NDArray[np.float32]

# HIPPO's shares, chosen on validation clips (docs/methods.md).
_DISTINCT_SHARE = 0.05  # of quality; the rest is relevance
_PLACE_POWER = 0.1
_EVEN_SHARE = 0.1  # of the budget

_CLIP_QUANTILE = 0.995  # attention sinks
_POOL = 3  # candidates per cell of the budget, the best ones; others would hardly be chosen, and cost time
_MAX_STEPS = 256  # greedy steps of one cell each; the rest of a larger budget is chosen in one go
_RESERVE = 1e-3  # of the best cell's worth: remains for a cell whose content others show completely
_FADING = 0.78  # factor on the similarity per frame between: the draft must see that an object is still there
_LEAST = 1e-6  # a smaller remainder is rounding error


def hippo(cells: Candidates, relevance: Tensor | None) -> Tensor:
    """Our version of HIPPO (arXiv 2601.08273): relevance to the text and distinctiveness, each less what cells chosen
    nearby already show. Without relevance, distinctiveness alone counts.
    """
    quality = ranks(cells.distinctiveness)
    if relevance is not None:
        wanted = relative(debiased(relevance, cells, _PLACE_POWER))
        quality = _DISTINCT_SHARE * quality + (1 - _DISTINCT_SHARE) * wanted
    num_diverse = cells.budget - int(_EVEN_SHARE * cells.budget)
    chosen = greedy_map(quality, cells.units, cells.times[cells.frames], num_diverse)
    return filled_evenly(chosen, cells.num_cells, cells.budget)


def ranks(scores: Tensor) -> Tensor:
    """Ranks of [C], C > 1, scaled to [0, 1]; equal scores share the mean of their ranks."""
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


def greedy_map(quality: Tensor, units: Tensor, times: Tensor, budget: int) -> Tensor:
    """Indices of `budget` of the C cells: greedy maximum of a determinant (Chen et al., NeurIPS 2018).

    quality [C] in [0, 1]; units [C, hidden] of unit length; times int64 [C], in frames. Let L(i, j) = quality(i)
    quality(j) max(0, cos(i, j)) 0.78^|frames between|. The determinant of the chosen rows and columns is a product over
    the chosen cells: each factor is the part of the cell's squared quality that the cells chosen before do not show.
    Each step chooses the cell with the largest remaining part.
    """
    pool = top_indices(quality, _POOL * budget)
    quality, units, times = quality[pool], units[pool], times[pool].to(quality.dtype)
    num_steps = min(budget, _MAX_STEPS)
    # On the host even for cells on a GPU: each step depends on the one before, and hundreds of waits for a GPU that
    # another process uses, too, took seconds. Beside numpy, torch's calls take twice as long.
    chosen, left = _greedy(quality.cpu().numpy(), units.cpu().numpy(), times.cpu().numpy(), num_steps)
    rest = top_indices(torch.from_numpy(left), budget - len(chosen)).to(pool.device)
    return pool[torch.cat((pool.new_tensor(chosen), rest))]


def _greedy(quality: Floats, units: Floats, times: Floats, num_steps: int) -> tuple[list[int], Floats]:
    """The chosen cells, at most one per step, and the remainders of the others."""
    shown = np.zeros((num_steps, len(quality)), np.float32)
    left, scaled = quality**2 + _RESERVE, quality[:, None] * units
    chosen: list[int] = []
    for step in range(num_steps):
        cell = int(left.argmax())
        worth = left[cell]
        if worth < _LEAST:
            break
        share = (scaled @ scaled[cell]).clip(0.0)  # in place from here on: numpy's allocations would take as long
        share *= _FADING ** abs(times - times[cell])
        share -= shown[:step, cell] @ shown[:step]
        share /= worth**0.5
        shown[step] = share
        share *= share
        left -= share
        left[cell] = -float("inf")
        chosen.append(cell)
    left = left.clip(0.0)
    left[chosen] = -1.0
    return chosen, left
