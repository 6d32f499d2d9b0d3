"""EncoderCache: the features of videos seen lately, so that another question about one needs no vision tower."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL
from vidspec_models.request import Video


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedVideo:
    """All that a prompt needs of a video, or of a part of one: the costly part of preparing one, and the same in every
    conversation.
    """

    words: str  # what stands for it in the templated text
    features: Tensor  # [rows, hidden size], projected, in the order of the prompt's rows
    shape: tuple[int, int, int]  # frames, rows and columns of its cells
    grid: Tensor  # int64 [rows, 3]: (frame, row, column), frames from 0
    additions: tuple[Tensor, ...] = ()  # [rows, hidden size] each, for the decoder's first layers
    patches: Tensor | None = None  # int64 [1, 3]: patches in time, height and width, where positions depend on them
    seconds_per_patch: float | None = None  # of time, where positions depend on it
    key: str | None = None
    stays: Tensor | None = None  # bool: which of the rows that its words stand for are here; None: all

    @property
    def num_frames(self) -> int:
        """As the model sees them, which may be pairs of a video's."""
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.features, *self.additions))

    def grid_from(self, first: int) -> Tensor:
        """Its grid, frames counted from `first`."""
        return self.grid + torch.tensor((first, 0, 0)).where(self.grid != NO_CELL, 0)

    def only(self, kept: Tensor) -> EncodedVideo:
        """Those of its rows that are marked in `kept`, bool [rows]; of a video that has all of them."""
        assert self.stays is None
        return replace(
            self,
            features=self.features[kept],
            grid=self.grid[kept.to(self.grid.device)],
            additions=tuple(rows[kept] for rows in self.additions),
            stays=kept.cpu(),
        )


def joined(parts: Sequence[EncodedVideo]) -> EncodedVideo:
    """The video whose parts these are, one after the other: all of them whole, or all of them chosen from."""
    if len(parts) == 1:
        return parts[0]
    grids, num_frames = list[Tensor](), 0
    for part in parts:
        grids.append(part.grid_from(num_frames))
        num_frames += part.num_frames
    patches = [part.patches for part in parts if part.patches is not None]
    stays = [part.stays for part in parts if part.stays is not None]
    assert len(stays) in (0, len(parts))
    return replace(
        parts[0],
        words="".join(part.words for part in parts),
        features=torch.cat([part.features for part in parts]),
        shape=(num_frames, *parts[0].shape[1:]),
        grid=torch.cat(grids),
        additions=tuple(map(torch.cat, zip(*(part.additions for part in parts), strict=True))),
        patches=torch.cat([torch.cat(patches)[:, :1].sum(0, keepdim=True), patches[0][:, 1:]], 1) if patches else None,
        stays=torch.cat(stays) if stays else None,
    )


class EncoderCache:
    """Under a budget of bytes; the least recently used go first. A video without a key is never kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, EncodedVideo] = OrderedDict()

    def get(self, video: Video, encode: Callable[[Video], EncodedVideo]) -> EncodedVideo:
        """The video's features, computed by `encode` if they are not here."""
        if video.key is None:
            return encode(video)
        if (kept := self._kept.get(video.key)) is None:
            kept = self._kept[video.key] = encode(video)
            self._num_bytes += kept.num_bytes
        self._kept.move_to_end(video.key)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
        return kept
