"""EncodedVideos: the features of videos seen lately, so that another question about one needs no vision tower."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from vidspec_models.inputs import EncodedVideo, Video


class EncodedVideos:
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
