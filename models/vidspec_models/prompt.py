"""Prompt: the rows that a model family makes from a conversation, ready for the decoder, and its video rows."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.request import TowerOutput

NO_CELL = -1  # in `Prompt.grid`: a video row that is not a cell of a frame
CLIP_GAP = 1000  # frame numbers skipped between two videos, so that their frames never count as close in time
VIDEO_BITS = 32  # bits for a row's number within its video, in `PromptIdentity.rows`


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptIdentity:
    """What a prompt's rows are made from: prompts whose identities begin alike, with the same videos, share rows."""

    video_keys: tuple[str, ...]
    rows: NDArray[np.int64]  # [P]: token ids; for row r of video v, both from 0: -1 - r - (v << 32)

    def keys_of(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """The keys of the videos that have some of these rows, which are the prompt's first."""
        return self.video_keys[: ((-1 - int(rows.min())) >> VIDEO_BITS) + 1]

    def num_common(self, other: PromptIdentity) -> int:
        """Length of the common beginning, up to the first video that differs."""
        pairs = enumerate(zip(self.video_keys, other.video_keys, strict=False))
        num_known = next((index for index, (ours, theirs) in pairs if ours != theirs), len(self.video_keys))
        most = min(len(self.rows), len(other.rows))
        ours = self.rows[:most]
        differ = (ours != other.rows[:most]) | (ours < -(num_known << VIDEO_BITS))
        return int(differ.argmax()) if differ.any() else most


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Prompt:
    """A prompt as the decoder's input, on the model's device.

    `is_video` marks the rows that stand for frames (pruning may drop them); `next_position` is the rotary
    position of the first answer token, which differs from the row count in families with multi-axis positions.
    """

    ids: tuple[int, ...]  # [P] token ids, placeholders expanded
    embeddings: Tensor  # [P, hidden size], features merged in
    rotary: tuple[Tensor, Tensor]  # cos and signed sin, each [P, 1, D]
    is_video: Tensor  # bool [P]
    next_position: int
    # int64 [video rows, 3]: (frame, row, column), frames counted through all videos, with CLIP_GAP between them
    grid: Tensor = field(default_factory=lambda: torch.empty(0, 3, dtype=torch.int64))
    deepstack: Tensor | None = None  # [L, P, hidden size]: added to the rows after each of the first L layers
    identity: PromptIdentity | None = None  # None: nothing computed for this prompt may be reused for another one
    video_shapes: tuple[tuple[int, int, int], ...] = ()  # frames, rows and columns of each whole video's cells
    tower: tuple[TowerOutput, ...] = ()  # one per video, if asked for and if no video's features were cached

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def context_used(self) -> int:
        """Tokens of context that the prompt takes: rows, or positions if time stamps run ahead of the rows."""
        return max(len(self.ids), self.next_position)

    @property
    def num_video_tokens(self) -> int:
        return int(self.is_video.sum())


@torch.inference_mode()
def pruned(prompt: Prompt, kept: Tensor) -> Prompt:
    """The prompt with only the video rows `kept` (sorted indices into its video rows) and all of its text.

    Positions stay as they were, so the answer starts at the same `next_position` as without pruning. Returns the
    prompt itself if nothing is left out.
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
        deepstack=None if prompt.deepstack is None else prompt.deepstack[:, rows],
        identity=None,
    )


def cell_rows(prompt: Prompt) -> Tensor:
    """Indices into the prompt's video rows, int64 [C], of the rows that are cells of a frame."""
    return (prompt.grid != NO_CELL).all(1).nonzero()[:, 0]


def is_first_frame(times: Tensor) -> Tensor:
    """bool [F]: which frames are the first of their video; `times`, int64 [F], are their increasing numbers."""
    begins = torch.ones_like(times, dtype=torch.bool)
    begins[1:] = times.diff() > CLIP_GAP
    return begins


def grid_checksum(prompt: Prompt) -> int:
    """Equal for two prompts with the same cell positions in the same order, whatever their models."""
    cells = prompt.grid[cell_rows(prompt)].to(torch.int32).cpu().contiguous()
    return zlib.crc32(cells.numpy().tobytes())
