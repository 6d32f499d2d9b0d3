"""How many cells stay, and which: the best, and an even share that leaves no frame unseen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LEAST_KEPT = 16  # cells: below that a clip is too short to prune further
_MOST_PRUNED = 0.99


def require_ratio(ratio: float) -> None:
    """Raise ValueError for a share that may not be pruned."""
    if not 0.0 <= ratio <= _MOST_PRUNED:
        raise ValueError(f"the pruned share must be in [0, {_MOST_PRUNED}], not {ratio!r}")


def num_kept(num_cells: int, ratio: float) -> int:
    """Cells of `num_cells` that stay when a share `ratio` is pruned: never fewer than 16, all if there are fewer."""
    require_ratio(ratio)
    return min(num_cells, max(LEAST_KEPT, int((1.0 - ratio) * num_cells + 1e-9)))


def best(scores: Tensor, budget: int) -> Tensor:
    """Indices of the `budget` largest of [C]; equal ones in order."""
    return scores.argsort(descending=True, stable=True)[:budget]


def spaced(num_all: int, num_wanted: int, device: torch.device) -> Tensor:
    """`num_wanted` different indices below `num_all`, int64, evenly spaced, both ends included."""
    if num_wanted >= num_all:
        return torch.arange(num_all, device=device)
    return torch.from_numpy(np.linspace(0, num_all - 1, max(num_wanted, 0)).round().astype(np.int64)).to(device)


def with_even(chosen: Tensor, num_cells: int, budget: int) -> Tensor:
    """`budget` indices: those `chosen` (of `num_cells`), and what is left of the budget evenly from all others.

    Evenly spaced in reading order, the others are a floor for every frame: with m of them among L, no run of
    ceil((L - 1) / (m - 1)) of these is left without one, so no frame of that many cells is.
    """
    is_left = torch.ones(num_cells, dtype=torch.bool, device=chosen.device)
    is_left[chosen] = False
    left = is_left.nonzero()[:, 0]
    return torch.cat((chosen, left[spaced(len(left), budget - len(chosen), chosen.device)]))
