"""Choosing cells that are good each and different together: what a kept cell already shows counts no more."""

from __future__ import annotations

import torch
from torch import Tensor

from .budget import best

_POOL = 3  # budgets: cells beyond are too poor to be chosen; they would only cost time
_MOST_STEPS = 256  # one cell each; the rest of a larger budget is chosen at once
_RESERVE = 1e-3  # of the best cell's worth, left to a cell that others show completely


def diverse(quality: Tensor, units: Tensor, budget: int) -> Tensor:
    """Indices of `budget` of the C cells: greedy maximum of a determinant (Chen et al., NeurIPS 2018).

    quality [C] in [0, 1]; units [C, hidden] of unit length. With L(i, j) = quality(i) quality(j) max(0, cos(i, j)) the
    determinant of the rows and columns chosen is a product over the cells: of what is left of each one's squared
    quality when all that the cells before it show is taken away. The next cell is the one with most left.
    """
    pool = best(quality, _POOL * budget)
    quality, units = quality[pool], units[pool]
    left = quality.square() + _RESERVE
    num_steps = min(budget, _MOST_STEPS)
    shown = quality.new_zeros(num_steps, len(pool))
    chosen = []
    for step in range(num_steps):
        cell = int(left.argmax())
        shared = quality[cell] * quality * (units @ units[cell]).clamp(min=0.0)
        shown[step] = (shared - shown[:step, cell] @ shown[:step]) / left[cell].sqrt()
        left = (left - shown[step].square()).clamp(min=0.0)
        chosen.append(cell)
        left[chosen] = -1.0
    rest = best(left, budget - num_steps)
    return pool[torch.cat((pool.new_tensor(chosen), rest))]
