"""LocalVideoStore: uploads that are kept for more questions, each seen by the caller who sent it and by nobody else."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vidspec_service.api.schemas.fields import VideoFile
from vidspec_service.api.schemas.videos import Video
from vidspec_service.decoding.clip import over_limit
from vidspec_service.errors import NotFound

MIN_VIDEO_BYTES = 64 * 1024  # a video counts for at least this much, so that the budget bounds their number, too


@dataclass(slots=True)
class StoredVideo:
    """A file of ours. It is deleted once it is dropped and nobody reads it."""

    file: VideoFile
    facts: Video
    expires_at: float
    num_readers: int = 0
    is_dropped: bool = False

    @property
    def num_bytes(self) -> int:
        """How many bytes of the budget it counts for."""
        return max(MIN_VIDEO_BYTES, self.file.num_bytes)

    def delete_if_done(self) -> None:
        """Delete the file, unless it is still needed."""
        if self.is_dropped and self.num_readers == 0:
            self.file.path.unlink(missing_ok=True)


class LocalVideoStore:
    """Files under a budget of bytes, each for `ttl_s` after its last use.

    Room for another is made by who has the most: the least recently used go first. So nobody loses videos to a caller
    who uploads without end. `now` is a wall clock, as clients are told when a video expires.
    """

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        forget_clips: Callable[[str, str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._now = now
        # Each caller's by their ids; those used last come last, and so expire last.
        self._kept: defaultdict[str, OrderedDict[str, StoredVideo]] = defaultdict(OrderedDict)
        self._num_bytes: Counter[str] = Counter()
        self._forget_clips = forget_clips

    def keep(self, caller: str, file: VideoFile, facts: Video) -> Video:
        """Take over `file`. If the video is kept already, its lifetime starts again and `file` is deleted.

        Raises VideoTooLarge for a file that can never fit; it then still belongs to the caller.
        """
        kept = self._use(caller, file.content_id)
        if kept is not None:
            file.path.unlink(missing_ok=True)
            return _facts_of(kept)
        kept = StoredVideo(file, facts, self._now() + self._ttl_s)
        if kept.num_bytes > self._max_bytes:
            limit = f"{self._max_bytes:,} bytes"
            raise over_limit(f"The video counts for {kept.num_bytes:,} bytes", limit, "VIDSPEC_MAX_STORED_BYTES")
        self._num_bytes[caller] += kept.num_bytes
        while self._num_bytes.total() > self._max_bytes:
            most = max(filter(self._kept.get, self._num_bytes), key=self._num_bytes.__getitem__)
            self._drop(most, next(iter(self._kept[most])))
        self._kept[caller][file.content_id] = kept
        return _facts_of(kept)

    def find(self, caller: str, video_id: str) -> Video | None:
        """What is known of a kept video; None if there is none. This does not count as a use."""
        kept = self._found(caller, video_id)
        return None if kept is None else _facts_of(kept)

    def ids(self, caller: str) -> list[str]:
        """A caller's videos, the most recently used first."""
        self.expire()
        return [*reversed(self._kept[caller])]

    @contextmanager
    def reading(self, caller: str, video_id: str) -> Iterator[VideoFile]:
        """Use a video for the length of the block, in which its file stays, even if it is dropped. Raises NotFound."""
        kept = self._use(caller, video_id)
        if kept is None:
            raise no_such_video()
        kept.num_readers += 1
        try:
            yield kept.file
        finally:
            kept.num_readers -= 1
            kept.delete_if_done()
            if kept.is_dropped:
                self._forget_clips(caller, video_id)  # its frames may have been decoded since the drop

    def delete(self, caller: str, video_id: str) -> None:
        """Delete a video and its frames; raises NotFound."""
        self._forget_clips(caller, video_id)
        self.expire()
        if video_id not in self._kept[caller]:
            raise no_such_video()
        self._drop(caller, video_id)

    def expire(self) -> None:
        """Delete videos that are too old."""
        now = self._now()
        for caller, videos in self._kept.items():
            while videos and next(iter(videos.values())).expires_at <= now:
                self._drop(caller, next(iter(videos)))

    @property
    def usage(self) -> tuple[int, int]:
        """How many videos are kept, and how many bytes they count for."""
        return sum(map(len, self._kept.values())), self._num_bytes.total()

    def _use(self, caller: str, video_id: str) -> StoredVideo | None:
        """The kept video, whose lifetime starts again."""
        if (kept := self._found(caller, video_id)) is not None:
            kept.expires_at = self._now() + self._ttl_s
            self._kept[caller].move_to_end(video_id)
        return kept

    def _found(self, caller: str, video_id: str) -> StoredVideo | None:
        self.expire()
        kept = self._kept[caller].get(video_id)
        if kept is not None and not kept.file.path.exists():  # somebody has cleared the folder
            self._drop(caller, video_id)
            return None
        return kept

    def _drop(self, caller: str, video_id: str) -> None:
        kept = self._kept[caller].pop(video_id)
        self._num_bytes[caller] -= kept.num_bytes
        kept.is_dropped = True
        kept.delete_if_done()


def no_such_video(param: str = "video_id") -> NotFound:
    """The error for a video that is not kept for this caller."""
    return NotFound("No such video is kept for you; it may have expired. Upload it again.", param=param)


def _facts_of(kept: StoredVideo) -> Video:
    return kept.facts.model_copy(update={"expires_at": int(kept.expires_at)})
