"""Temporal token merging, DyCoke's first stage: where frames repeat, the earlier tokens stand for the later.

Windows of four frames. The second frame is compared with the first and the fourth with the third, place by place;
then the third with the first. Of a compared frame those tokens stay that are least like their counterparts and least
like their frame (our addition). Nothing is averaged: merging is deletion. A last window may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression import num_left
from vidspec_models.inputs import Prompt, begins_video, cell_rows, pruned

_COMPARED_WITH = (0, 1, 2, 1)  # by place in the window: how many frames back; the first stays whole
_DECIMALS = 5  # beyond them similarities of equal tokens differ by rounding, on every machine otherwise


def merge_frames(features: Tensor, merge_ratio: float) -> Tensor:
    """Which tokens of a video stay: bool [F, M] for projected features [F, M, hidden size].

    Of every compared frame floor((1 - K) * M) tokens stay, the least expendable; of equals the first.
    """
    num_frames, num_tokens = features.shape[:2]
    kept = torch.ones(num_frames, num_tokens, dtype=torch.bool, device=features.device)
    count = num_left(num_tokens, merge_ratio)
    for frame in range(num_frames):
        earlier = compared_with(frame)
        if earlier != frame:
            found = expendable(features[frame].float(), features[earlier].float())
            kept[frame, found.round(decimals=_DECIMALS).argsort(stable=True)[count:]] = False
    return kept


def compared_with(frame: int) -> int:
    """The frame whose tokens may stand for this one's: itself, if it is the first of a window."""
    return frame - _COMPARED_WITH[frame % len(_COMPARED_WITH)]


def expendable(frame: Tensor, earlier: Tensor) -> Tensor:
    """float [M]: cosine of each token of a frame [M, hidden size] with its counterpart, and with the frame's mean.

    The paper has the first part only. By it a thing that stands still is deleted as readily as the background behind
    it, and nothing in these frames says any more that it is still there (docs/methods.md).
    """
    repeated = functional.cosine_similarity(frame, earlier, dim=-1)
    ordinary = functional.cosine_similarity(frame, frame.mean(0, keepdim=True), dim=-1)
    return repeated + ordinary


def merge_prompt(prompt: Prompt, merge_ratio: float) -> Prompt:
    """The prompt without the merged rows; text and rows that are no cell of a frame (newlines) all stay.

    A prompt without video, or at ratio 0, is returned as it is. Every video begins a new window.
    """
    if not len(prompt.grid) or merge_ratio == 0:
        return prompt
    features, cells = prompt.embeddings[prompt.is_video], cell_rows(prompt)
    kept = torch.ones(len(features), dtype=torch.bool, device=features.device)
    for num_frames, part in _videos(prompt.grid, cells):
        frames = features[part].unflatten(0, (num_frames, -1))
        kept[part] = merge_frames(frames, merge_ratio).flatten()
    return pruned(prompt, kept.nonzero()[:, 0])


def _videos(grid: Tensor, cells: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each video's number of frames, and their cells' rows of `grid` [V, 3]."""
    times, frames = grid[cells][:, 0].unique(return_inverse=True)
    video_of_frame = begins_video(times).cumsum(0)
    num_frames, num_cells = video_of_frame.bincount(), video_of_frame[frames].bincount()
    for number, part in zip(num_frames.tolist(), cells.split(num_cells.tolist()), strict=True):
        if number:  # they are counted from 1
            yield number, part
