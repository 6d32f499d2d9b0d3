"""Prompt: the rows that a family makes of a conversation, ready for the decoder; and its rows that show video."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.request import TowerRows

NO_CELL = -1  # in `Prompt.grid`: a video row that is no cell of a frame
CLIP_GAP = 1000  # frame numbers left out between two videos: what compares frames close in time compares none of both


VIDEO_BITS = 32  # of a row's number within its video, in `PromptIdentity.rows`


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptIdentity:
    """What the rows are made of: where these are equal, and of the same videos, prompts begin with equal rows."""

    video_keys: tuple[str, ...]
    rows: NDArray[np.int64]  # [P]: token ids; at row r of video v, both from 0, -1 - r - (v << 32)

    def num_common(self, other: PromptIdentity) -> int:
        """Rows that both begin with, up to the first video that is not the same in both; none if that is the first."""
        pairs = enumerate(zip(self.video_keys, other.video_keys, strict=False))
        num_known = next((index for index, (ours, theirs) in pairs if ours != theirs), len(self.video_keys))
        if num_known == 0:
            return 0  # the other may be another caller's, who must not learn what this one says
        most = min(len(self.rows), len(other.rows))
        ours = self.rows[:most]
        differ = (ours != other.rows[:most]) | (ours < -(num_known << VIDEO_BITS))
        return int(differ.argmax()) if differ.any() else most


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Prompt:
    """A prompt as the decoder takes it, on the model's device.

    `is_video` marks the rows that stand for frames (pruning may drop them); `next_position` is the rotary
    position of the first answer token, which is not the row count once a family uses multi-axis positions.
    """

    ids: tuple[int, ...]  # [P] token ids, placeholders expanded
    embeddings: Tensor  # [P, hidden size], features merged in
    rotary: tuple[Tensor, Tensor]  # cos and signed sin, each [P, 1, D]
    is_video: Tensor  # bool [P]
    next_position: int
    # int64 [video rows, 3]: (frame, row, column), frames counted through all videos, with CLIP_GAP between them
    grid: Tensor = field(default_factory=lambda: torch.empty(0, 3, dtype=torch.int64))
    layer_additions: Tensor | None = None  # [L, P, hidden size]: added to the rows after each of the first L layers
    identity: PromptIdentity | None = None  # None: nothing computed for it may serve another prompt
    video_shapes: tuple[tuple[int, int, int], ...] = ()  # frames, rows and columns of each whole video's cells
    tower: tuple[TowerRows, ...] = ()  # of its videos, where that was asked for and none was known

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def context_used(self) -> int:
        """What it takes of the context: rows, or positions where time stamps run ahead of the rows."""
        return max(len(self.ids), self.next_position)

    @property
    def num_video_tokens(self) -> int:
        return int(self.is_video.sum())


@torch.inference_mode()
def pruned(prompt: Prompt, kept: Tensor) -> Prompt:
    """The prompt with only the video rows `kept` (sorted indices into its video rows) and all of its text.

    Positions stay as they were, so the answer starts where it would have (`next_position`); with nothing left out
    it is the prompt itself.
    """
    if len(kept) == prompt.num_video_tokens:
        return prompt
    stays = ~prompt.is_video
    stays[prompt.is_video.nonzero()[:, 0][kept]] = True
    rows = stays.nonzero()[:, 0]
    cos, sin = prompt.rotary
    return replace(
        prompt,
        ids=tuple(compress(prompt.ids, stays.tolist())),
        embeddings=prompt.embeddings[rows],
        rotary=(cos[rows], sin[rows]),
        is_video=prompt.is_video[rows],
        grid=prompt.grid[kept],
        layer_additions=None if prompt.layer_additions is None else prompt.layer_additions[:, rows],
        identity=None,
    )


def cell_rows(prompt: Prompt) -> Tensor:
    """Indices into the prompt's video rows, int64 [C], of those that are cells of a frame."""
    return (prompt.grid != NO_CELL).all(1).nonzero()[:, 0]


def begins_video(times: Tensor) -> Tensor:
    """bool [F]: which of the frames with these increasing numbers, int64 [F], are the first of their video."""
    begins = torch.ones_like(times, dtype=torch.bool)
    begins[1:] = times.diff() > CLIP_GAP
    return begins


def grid_checksum(prompt: Prompt) -> int:
    """Equal for two prompts whose cells are the same places in the same order, whatever their models."""
    cells = prompt.grid[cell_rows(prompt)].to(torch.int32).cpu().contiguous()
    return zlib.crc32(cells.numpy().tobytes())
