"""Choosing cells that are good each and different together: what a kept cell already shows counts less near it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .budget import best

_POOL = 3  # budgets: cells beyond are too poor to be chosen; they would only cost time
_MOST_STEPS = 256  # one cell each; the rest of a larger budget is chosen at once
_RESERVE = 1e-3  # of the best cell's worth, left to a cell that others show completely
_FADING = 0.78  # of what a cell shows, for each frame between: that a thing is still there must be seen, too
_LEAST = 1e-6  # below it what is left is rounding


def diverse(quality: Tensor, units: Tensor, frames: Tensor, budget: int) -> Tensor:
    """Indices of `budget` of the C cells: greedy maximum of a determinant (Chen et al., NeurIPS 2018).

    quality [C] in [0, 1]; units [C, hidden] of unit length; frames int64 [C]. With L(i, j) = quality(i) quality(j)
    max(0, cos(i, j)) 0.78^|frames between| the determinant of the rows and columns chosen is a product over the cells:
    of what is left of each one's squared quality when all that the cells before it show is taken away. The next cell
    is the one with most left.
    """
    pool = best(quality, _POOL * budget)
    quality, units, frames = quality[pool], units[pool], frames[pool].to(quality.dtype)
    num_steps = min(budget, _MOST_STEPS)
    if quality.device.type == "cpu":  # numpy's overhead is half of torch's, and a step is little else
        shown = np.zeros((num_steps, len(pool)), np.float32)
        chosen, left = _greedy(quality.numpy(), units.numpy(), frames.numpy(), shown)
    else:
        chosen, left = _greedy(quality, units, frames, quality.new_zeros(num_steps, len(pool)))
    rest = best(torch.as_tensor(left), budget - len(chosen))
    return pool[torch.cat((pool.new_tensor(chosen), rest))]


def _greedy(quality: Any, units: Any, frames: Any, shown: Any) -> tuple[list[int], Any]:
    """The cells chosen, at most one for each row of `shown` (zeros), and what is left of the others. Any arrays."""
    left = quality**2 + _RESERVE
    chosen: list[int] = []
    for step in range(len(shown)):
        cell = int(left.argmax())
        if left[cell] < _LEAST:
            break
        shared = quality[cell] * quality * (units @ units[cell]).clip(0.0) * _FADING ** abs(frames - frames[cell])
        shown[step] = (shared - shown[:step, cell] @ shown[:step]) / left[cell] ** 0.5
        left = (left - shown[step] ** 2).clip(0.0)
        chosen.append(cell)
        left[chosen] = -1.0
    return chosen, left
