"""Handmade prompts: two text rows, video rows, three text rows; every row has its own id."""

from __future__ import annotations

import torch
from torch import Tensor

from vidspec_models.prompt import CLIP_GAP, NO_CELL, Prompt

WIDTH = 8


def cells(first_frame: int, num_frames: int, num_rows: int, num_columns: int) -> Tensor:
    """(frame, row, column) of every cell in reading order, int64 [cells, 3]."""
    frames = torch.arange(first_frame, first_frame + num_frames)
    return torch.cartesian_prod(frames, torch.arange(num_rows), torch.arange(num_columns))


def video_prompt(
    num_frames: int,
    num_rows: int,
    num_columns: int,
    *,
    has_newline: bool = False,
    then: tuple[int, int, int] | None = None,
) -> Prompt:
    """A prompt with a video of (frames, rows, columns), and a second one of size `then` if given."""
    grids = [cells(0, num_frames, num_rows, num_columns)]
    if then is not None:
        grids.append(cells(num_frames + CLIP_GAP, *then))
    if has_newline:
        grids.append(torch.full((1, 3), NO_CELL))
    grid = torch.cat(grids)
    total = 2 + len(grid) + 3
    generator = torch.Generator().manual_seed(total)
    is_video = torch.zeros(total, dtype=torch.bool)
    is_video[2 : 2 + len(grid)] = True
    rotary = torch.randn(2, total, 1, 4, generator=generator)
    return Prompt(
        ids=tuple(range(100, 100 + total)),
        embeddings=torch.randn(total, WIDTH, generator=generator),
        rotary=(rotary[0], rotary[1]),
        is_video=is_video,
        next_position=total + 4,
        grid=grid,
        deepstack=torch.randn(2, total, WIDTH, generator=generator),
    )
