"""Videos: uploads that are kept for more questions, each seen by the caller who sent it and by nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cachetools import Cache, TTLCache

from vidspec_service.api.schemas.videos import Video
from vidspec_service.api.store.clips import VideoFile
from vidspec_service.decoding.limits import over_limit
from vidspec_service.errors import NotFound

LEAST_BYTES = 64 * 1024  # the least that a video counts for, so that a budget bounds the number of videos, too
Key = tuple[str, str]  # caller, content id


@dataclass(slots=True)
class KeptVideo:
    """A file of ours. It is deleted once it is dropped and nobody reads it."""

    file: VideoFile
    facts: Video
    expires_at: float = 0.0
    num_readers: int = 0
    is_dropped: bool = False

    @property
    def num_bytes(self) -> int:
        """How many bytes of the budget it counts for."""
        return max(LEAST_BYTES, self.file.num_bytes)

    def delete_if_done(self) -> None:
        """Delete the file, unless it is still needed."""
        if self.is_dropped and self.num_readers == 0:
            self.file.path.unlink(missing_ok=True)


class Videos:
    """Files under a budget of bytes, each for `ttl_s` after its last use; the least recently used go first.

    `now` is a wall clock, as clients are told when a video expires.
    """

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        forget_clips: Callable[[str, str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._kept = _Cache(max_bytes, ttl_s, now, lambda kept: kept.num_bytes)
        self._forget_clips = forget_clips

    def keep(self, caller: str, file: VideoFile, facts: Video) -> Video:
        """Take over `file`. If the video is kept already, its lifetime starts again and `file` is deleted.

        Raises VideoTooLarge for a file that can never fit; it then still belongs to the caller.
        """
        key, new = (caller, file.content_id), KeptVideo(file, facts)
        if (kept := self._kept.use(key)) is not None:
            file.path.unlink(missing_ok=True)
            return _told(kept)
        if new.num_bytes > self._kept.maxsize:
            limit = f"{self._kept.maxsize:,} bytes"
            raise over_limit(f"The video has {file.num_bytes:,} bytes", limit, "VIDSPEC_MAX_STORED_BYTES")
        self._kept[key] = new
        return _told(new)

    def find(self, caller: str, video_id: str) -> Video | None:
        """What is known of a kept video; None if there is none. This does not count as a use."""
        kept = self._kept.peek((caller, video_id))
        return None if kept is None else _told(kept)

    def ids(self, caller: str) -> list[str]:
        """A caller's videos, the most recently used first."""
        return [video_id for owner, video_id in reversed(list(self._kept)) if owner == caller]

    @contextmanager
    def reading(self, caller: str, video_id: str) -> Iterator[VideoFile]:
        """Use a video for the length of the block, in which its file stays, even if it is dropped. Raises NotFound."""
        kept = self._kept.use((caller, video_id))
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

    def drop(self, caller: str, video_id: str) -> None:
        """Delete a video and its frames; raises NotFound."""
        self._forget_clips(caller, video_id)
        if self._kept.pop((caller, video_id), None) is None:
            raise no_such_video()

    def expire(self) -> None:
        """Delete videos that are too old."""
        self._kept.expire()

    def close(self) -> None:
        """Delete everything."""
        for key in list(self._kept):
            self._kept.pop(key, None)
        self._kept.expire()

    @property
    def load(self) -> tuple[int, int]:
        """How many videos are kept, and how many bytes they count for."""
        return len(self._kept), int(self._kept.currsize)


def no_such_video(param: str = "video_id") -> NotFound:
    """The error for a video that is not kept for this caller."""
    return NotFound("No such video is kept for you; it may have expired. Upload it again.", param=param)


class _Cache(TTLCache[Key, KeptVideo]):
    """Deletes the file of whatever leaves it."""

    def use(self, key: Key) -> KeptVideo | None:
        """The kept video, whose lifetime starts again."""
        kept = self.get(key)
        if kept is not None:
            super().__delitem__(key)  # its file stays
            self[key] = kept  # as the last: without the deletion, cachetools 8.0.2 would keep its place
        return kept

    def peek(self, key: Key) -> KeptVideo | None:
        """The kept video, without counting as a use: `self[key]` would make it the last to be evicted."""
        return Cache.__getitem__(self, key) if key in self else None

    def __setitem__(self, key: Key, kept: KeptVideo) -> None:
        kept.expires_at = self.timer() + self.ttl
        super().__setitem__(key, kept)

    def __delitem__(self, key: Key) -> None:
        kept = Cache.__getitem__(self, key)
        super().__delitem__(key)
        _dropped(kept)

    def expire(self, time: float | None = None) -> list[tuple[Key, KeptVideo]]:
        expired = list(super().expire(time))
        for _, kept in expired:
            _dropped(kept)
        return expired


def _told(kept: KeptVideo) -> Video:
    return kept.facts.model_copy(update={"expires_at": int(kept.expires_at)})


def _dropped(kept: KeptVideo) -> None:
    kept.is_dropped = True
    kept.delete_if_done()
