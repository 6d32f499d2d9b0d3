"""EncoderCache: the features of videos seen lately, so that another question about one needs no vision tower."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vidspec_models.request import Video


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
    kept: Tensor | None = None  # bool [rows]: which of them a prompt has, where the tower has chosen; None: all

    @property
    def num_frames(self) -> int:
        return int(self.grid[:, 0].max()) + 1

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.features, *self.additions))


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
