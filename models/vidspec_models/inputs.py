"""What a family turns a conversation into: prompt rows ready for the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_CELL = -1  # in `Prompt.grid`: a video row that is no cell of a frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message; `num_videos` of the conversation's videos, in order, precede its text."""

    role: str
    text: str
    num_videos: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Sampled frames and what a processor may want to know of their source."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] RGB
    source_indices: tuple[int, ...]  # [T]
    source_fps: float
    source_num_frames: int
    duration_s: float
    key: str | None = None  # equal keys mean equal videos; None: unlike any other


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedVideo:
    """All that a prompt needs of a video: the costly part of preparing one, and the same in every conversation."""

    words: str  # what stands for it in the templated text
    features: Tensor  # [rows, hidden size], projected, in the order of the prompt's rows
    grid: Tensor  # int64 [rows, 3]: (frame, row, column), frames from 0
    additions: tuple[Tensor, ...] = ()  # [rows, hidden size] each, for the decoder's first layers
    patches: Tensor | None = None  # int64 [1, 3]: patches in time, height and width, where positions depend on them
    seconds_per_patch: float | None = None  # of time, where positions depend on it
    key: str | None = None

    @property
    def num_frames(self) -> int:
        return int(self.grid[:, 0].max()) + 1

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.features, *self.additions))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptIdentity:
    """What the rows are made of: prompts of the same videos whose first `rows` are equal begin with equal rows."""

    video_keys: tuple[str, ...]
    rows: NDArray[np.int64]  # [P]: token ids, and at the videos' rows numbers of their own below zero


@dataclass(frozen=True, slots=True, kw_only=True)
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
    grid: Tensor | None = None  # int64 [video rows, 3]: (frame, row, column), frames counted through all videos
    layer_additions: Tensor | None = None  # [L, P, hidden size]: added to the rows after each of the first L layers
    identity: PromptIdentity | None = None  # None: nothing computed for it may serve another prompt

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
