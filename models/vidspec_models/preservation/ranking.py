"""Scores of any scale made comparable: ranks, shares of the largest, and attention freed of its places."""

from __future__ import annotations

import torch
from torch import Tensor

from .cell_grid import CellGrid

_CLIP_QUANTILE = 0.995  # attention sinks


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


def debiased(relevance: Tensor, grid: CellGrid, power: float) -> Tensor:
    """Attention [C] divided by what its frame and its place get on average, both to a power, and clipped.

    Places that draw attention whatever they show (borders, first and last frames) get the same in every frame; what
    stays is attention to content. A power below 1, because part of a frame's or a place's share is content, too.
    """
    frame = _relative_means(relevance, grid.frames, grid.num_frames).pow(power)
    slot = _relative_means(relevance, grid.slots, grid.shape[0] * grid.shape[1]).pow(power)
    found = relevance / (frame * slot)
    return found.clamp(max=float(torch.quantile(found, _CLIP_QUANTILE)))


def _relative_means(scores: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[C]: the mean score of each cell's group, over the mean of all; 1 where nothing is scored at all."""
    counts = torch.bincount(groups, minlength=num_groups).clamp(min=1)
    means = scores.new_zeros(num_groups).index_add(0, groups, scores) / counts
    whole = scores.mean()
    relative = means / whole if whole > 0 else torch.ones_like(means)
    return relative.clamp(min=1e-3)[groups]
