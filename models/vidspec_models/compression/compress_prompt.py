"""The prompt without the rows of video that a method leaves out: what the target prefills where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from vidspec_models.compression import DEFAULT_RATIO, DyCoke, merge_ratio_of
from vidspec_models.compression.frame_budgets import v_cast, vidcom2
from vidspec_models.compression.merging import merge_frames
from vidspec_models.inputs import Prompt, begins_video, cell_rows, pruned
from vidspec_models.request import Compression

Choose = Callable[[Tensor], Tensor]  # features of a video [F, M, hidden size] -> which tokens stay, bool [F, M]


def chooser(compression: Compression, ratio: float | None, dycoke: DyCoke) -> Choose | None:
    """The method that was asked for and its `ratio` of tokens that stay; None where all of the prompt's do.

    Without a ratio DyCoke merges by its own K.
    """
    if compression is Compression.V_CAST:
        return partial(v_cast, ratio=ratio or DEFAULT_RATIO)
    if compression is Compression.VIDCOM2:
        return partial(vidcom2, ratio=ratio or DEFAULT_RATIO)
    if compression is Compression.DYCOKE:
        return partial(merge_frames, merge_ratio=dycoke.merge_ratio if ratio is None else merge_ratio_of(ratio))
    return None


def ratio_in_tower(compression: Compression, ratio: float | None) -> float | None:
    """The share of tokens that stays where the vision tower chooses them; None where it chooses none."""
    return (ratio or DEFAULT_RATIO) if compression is Compression.EARLYTOM else None


def compress_prompt(prompt: Prompt, choose: Choose) -> Prompt:
    """The prompt without the rows that are not chosen; text and rows that are no cell of a frame (newlines) all stay.

    Every video is chosen from by itself. Images, and videos of one frame, stay whole.
    """
    features, cells = prompt.embeddings[prompt.is_video], cell_rows(prompt)
    kept = torch.ones(len(features), dtype=torch.bool, device=features.device)
    for num_frames, part in _videos(prompt.grid, cells):
        if num_frames > 1:
            kept[part] = choose(features[part].unflatten(0, (num_frames, -1))).flatten()
    return prompt if bool(kept.all()) else pruned(prompt, kept.nonzero()[:, 0])


def _videos(grid: Tensor, cells: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each video's number of frames, and their cells' rows of `grid` [V, 3]."""
    if not len(cells):
        return
    times, frames = grid[cells][:, 0].unique(return_inverse=True)
    video_of_frame = begins_video(times).cumsum(0)
    num_frames, num_cells = video_of_frame.bincount(), video_of_frame[frames].bincount()
    for number, part in zip(num_frames.tolist(), cells.split(num_cells.tolist()), strict=True):
        if number:  # they are counted from 1
            yield number, part
