"""Temporal token merging, DyCoke's first stage: where frames repeat, the earlier tokens stand for the later.

Windows of four frames. The second frame is compared with the first and the fourth with the third, place by place;
then the third with the first. Of a compared frame those tokens stay that are least like their counterparts and least
like their frame (our addition). Nothing is averaged: merging is deletion. A last window may be shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression import num_left

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
