"""EncoderCache: features of recently used videos, so that another question about a video skips the vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.prompt import NO_CELL
from vidspec_models.request import Video


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedVideo:
    """Everything that a prompt needs of a video or of a part of a video. It is the costly part of preparing a prompt,
    and the same in every conversation.
    """

    placeholder_text: str  # what stands for the video in the templated prompt
    features: Tensor  # [rows, hidden size], projected, in the order of the prompt's rows
    shape: tuple[int, int, int]  # frames, and rows and columns of cells per frame
    grid: Tensor  # int64 [rows, 3]: (frame, row, column), frames from 0
    deepstack: tuple[Tensor, ...] = ()  # [rows, hidden size] each, added after the decoder's first layers
    patches: Tensor | None = None  # int64 [1, 3]: patches in time, height and width, if positions depend on them
    seconds_per_patch: float | None = None  # duration of a patch, if positions depend on it
    key: str | None = None
    kept_mask: Tensor | None = None  # bool: which of the rows that `placeholder_text` stands for are present; None: all

    @property
    def num_frames(self) -> int:
        """Frames as the model sees them; each may be a pair of the video's frames."""
        return self.shape[0]

    @property
    def row_numbers(self) -> NDArray[np.int64]:
        """The number of each row among all rows that `placeholder_text` stands for."""
        return np.arange(len(self.features)) if self.kept_mask is None else self.kept_mask.numpy().nonzero()[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.features, *self.deepstack))

    def grid_from(self, first: int) -> Tensor:
        """The grid with frames counted from `first`."""
        return self.grid + torch.tensor((first, 0, 0)).where(self.grid != NO_CELL, 0)

    def only(self, kept: Tensor) -> EncodedVideo:
        """Only the rows marked in `kept`, bool [rows]; the video must have all of its rows."""
        assert self.kept_mask is None
        return replace(
            self,
            features=self.features[kept],
            grid=self.grid[kept.to(self.grid.device)],
            deepstack=tuple(rows[kept] for rows in self.deepstack),
            kept_mask=kept.cpu(),
        )


def concatenated(parts: Sequence[EncodedVideo]) -> EncodedVideo:
    """Join successive parts to one video. Either no part or every part has a `kept_mask`."""
    if len(parts) == 1:
        return parts[0]
    grids, num_frames = list[Tensor](), 0
    for part in parts:
        grids.append(part.grid_from(num_frames))
        num_frames += part.num_frames
    patches = [part.patches for part in parts if part.patches is not None]
    stays = [part.kept_mask for part in parts if part.kept_mask is not None]
    assert len(stays) in (0, len(parts))
    return replace(
        parts[0],
        placeholder_text="".join(part.placeholder_text for part in parts),
        features=torch.cat([part.features for part in parts]),
        shape=(num_frames, *parts[0].shape[1:]),
        grid=torch.cat(grids),
        deepstack=tuple(map(torch.cat, zip(*(part.deepstack for part in parts), strict=True))),
        patches=torch.cat([torch.cat(patches)[:, :1].sum(0, keepdim=True), patches[0][:, 1:]], 1) if patches else None,
        kept_mask=torch.cat(stays) if stays else None,
    )


class EncoderCache:
    """Has a budget in bytes; drops the least recently used videos first. A video without a key is never kept."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: LRUCache[str, EncodedVideo] = LRUCache(max_bytes, getsizeof=lambda kept: kept.num_bytes)

    def get(self, video: Video, encode: Callable[[Video], EncodedVideo]) -> EncodedVideo:
        """The video's features, computed by `encode` if they are not cached."""
        if video.key is None:
            return encode(video)
        if (kept := self._kept.get(video.key)) is None:
            kept = encode(video)
            if kept.num_bytes <= self._kept.maxsize:
                self._kept[video.key] = kept
        return kept
