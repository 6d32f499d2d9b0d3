"""Temporal token merging under a budget: of places that look as they did shortly before, the later cells go.

DyCoke's first stage (arXiv 2411.15024): in windows of four frames, 1 is compared with 0, 3 with 2, and 2 with 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .budget import best, spaced
from .cell_grid import CellGrid

_WINDOW = 4


def merged_in_time(features: Tensor, grid: CellGrid, budget: int) -> Tensor:
    """Indices of `budget` of the C cells: first frames of windows whole, of the others the least similar.

    features [C, hidden]. A cell of another frame is scored by its cosine with the same place of the frame that its
    own is compared with. First frames alone may be more than the budget: they are then thinned out evenly.
    """
    is_anchor = grid.frames % _WINDOW == 0
    anchors = is_anchor.nonzero()[:, 0]
    if len(anchors) >= budget:
        return anchors[spaced(len(anchors), budget, anchors.device)]
    dense = grid.dense(torch.nn.functional.normalize(features.float(), dim=-1))
    frame = torch.arange(grid.num_frames, device=features.device)
    earlier = torch.where(frame % _WINDOW == 2, frame - 2, frame - 1).clamp(min=0)
    change = grid.gathered(1.0 - torch.linalg.vecdot(dense, dense[earlier]))
    return best(change.masked_fill(is_anchor, torch.inf), budget)
