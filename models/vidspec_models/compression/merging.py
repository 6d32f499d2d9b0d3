"""Temporal token merging, DyCoke's first stage: where frames repeat, the earlier tokens replace the later ones.

Works on windows of four frames; the last one may be shorter. The second frame is compared with the first and the fourth
with the third, place by place; then the third with the first. Of a compared frame, tokens stay that are least similar
to their counterparts and to their frame's mean (our addition). Nothing is averaged: merging means deleting.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression import num_left

_COMPARED_WITH = (0, 1, 2, 1)  # by place in the window: how many frames back; the first frame stays whole
_DECIMALS = 5  # further digits of equal tokens' similarities are rounding errors, which differ between machines


def temporal_token_merging(features: Tensor, merge_ratio: float) -> Tensor:
    """Which tokens of a video stay: bool [F, M] for projected features [F, M, hidden size].

    Of every compared frame the floor((1 - K) * M) least expendable tokens stay; of equal ones the first.
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
    """The frame whose tokens may replace this frame's; the frame itself if it is the first of a window."""
    return frame - _COMPARED_WITH[frame % len(_COMPARED_WITH)]


def expendable(frame: Tensor, earlier: Tensor) -> Tensor:
    """float [M]: each token's cosine with its counterpart plus its cosine with the mean of its frame [M, hidden size].

    The paper has only the first term. With it alone an object that stands still is deleted as readily as the background
    behind it, and nothing in these frames shows any more that it is still there (docs/methods.md).
    """
    repeated = functional.cosine_similarity(frame, earlier, dim=-1)
    ordinary = functional.cosine_similarity(frame, frame.mean(0, keepdim=True), dim=-1)
    return repeated + ordinary
