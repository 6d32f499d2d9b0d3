"""Which cells of which frame are kept, a bit each: small enough for a channel, for requests that ask."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL, begins_video
from vidspec_service.engine.types import SeenCells

MOST_TOLD = 512 * 1024  # places: half of what a message may have; longer contexts than a million tokens are untold


def seen_cells(grid: Tensor, kept: Tensor) -> tuple[SeenCells, ...]:
    """One for each video of a prompt, in order; none if they have more than MOST_TOLD places.

    grid is int64 [V, 3], (frame, row, column) as in `Prompt`; kept are indices into its rows, int64 [K]. Rows that are
    no cells are left out.
    """
    is_kept = torch.zeros(len(grid), dtype=torch.bool, device=grid.device)
    is_kept[kept] = True
    is_cell = (grid != NO_CELL).all(1)
    cells, seen = grid[is_cell].cpu().numpy(), is_kept[is_cell].cpu().numpy()
    times, frames = np.unique(cells[:, 0], return_inverse=True)
    starts = begins_video(torch.from_numpy(times)).numpy()
    videos = starts.cumsum()[frames] - 1 if len(times) else frames
    found = [
        _of_one(cells[videos == video, 1:], frames[videos == video], seen[videos == video])
        for video in range(starts.sum())
    ]
    return tuple(found) if sum(int(np.prod(each.shape)) for each in found) <= MOST_TOLD else ()


def _of_one(places: np.ndarray, frames: np.ndarray, seen: np.ndarray) -> SeenCells:
    """places [C, 2], frames [C], seen bool [C] of one video."""
    frames = frames - frames.min()
    rows, columns = places.max(0) + 1
    dense = np.zeros((frames.max() + 1, rows, columns), np.bool_)
    dense[frames, places[:, 0], places[:, 1]] = seen
    return SeenCells(shape=(len(dense), int(rows), int(columns)), bits=np.packbits(dense, bitorder="little").tobytes())
