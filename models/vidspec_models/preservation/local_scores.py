"""What the projected features alone say of a cell: is it new in time, does it differ from what is around it?

HIPPO (arXiv 2601.08273) names both signals; its formulas are not public, these are ours (docs/methods.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cell_grid import CellGrid, neighbours


def centred(features: Tensor) -> Tensor:
    """[C, hidden] less the video's mean, each of unit length, float32.

    Without centring the part that all cells share rules every cosine, and the mean of a neighbourhood is ruled by
    its objects: what looks distinct then is the background beside them.
    """
    features = features.float()
    return torch.nn.functional.normalize(features - features.mean(0), dim=-1)


def temporal_novelty(units: Tensor, grid: CellGrid) -> Tensor:
    """float32 [C]: 1 - the largest cosine with the 3 x 3 cells around the same place one frame earlier.

    `units` [C, hidden] from `centred`. What has nothing earlier to be compared with gets the mean of the others, so
    that a first frame is neither preferred nor passed over.
    """
    dense, is_cell = grid.dense(units), grid.dense(torch.ones_like(units[:, 0]))
    best = torch.full_like(is_cell, -torch.inf)
    if grid.num_frames > 1:
        near = zip(neighbours(dense[:-1], with_self=True), neighbours(is_cell[:-1], with_self=True), strict=True)
        for earlier, is_there in near:
            cosine = torch.linalg.vecdot(dense[1:], earlier)
            best[1:] = torch.maximum(best[1:], cosine.masked_fill(is_there == 0, -torch.inf))
    novelty = 1.0 - grid.gathered(best)
    is_known = novelty.isfinite()
    neutral = novelty[is_known].mean() if is_known.any() else 0.0
    return novelty.masked_fill(~is_known, float(neutral))


def spatial_distinctiveness(units: Tensor, grid: CellGrid) -> Tensor:
    """float32 [C]: 1 - the mean cosine with the (at most 8) cells around it in its frame; 1 where there are none."""
    dense, is_cell = grid.dense(units), grid.dense(torch.ones_like(units[:, 0]))
    total, count = torch.zeros_like(is_cell), torch.zeros_like(is_cell)
    for beside in neighbours(dense, with_self=False):  # an empty place is a zero vector: its cosine adds nothing
        total += torch.linalg.vecdot(dense, beside)
    for is_there in neighbours(is_cell, with_self=False):
        count += is_there
    return 1.0 - grid.gathered(total / count.clamp(min=1.0))
