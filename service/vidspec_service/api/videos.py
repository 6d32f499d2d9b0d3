"""Videos: uploads that are kept for more questions, each seen by the caller who sent it and by nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vidspec_service.api.answers import Video
from vidspec_service.api.lru import Entry, Lru
from vidspec_service.decoding.limits import over_limit
from vidspec_service.errors import NotFound

LEAST_BYTES = 64 * 1024  # what a small video counts for, so that a budget bounds their number too


@dataclass(slots=True)
class Kept:
    """A file of ours. It is deleted when it is dropped and nobody reads it any more."""

    path: Path
    facts: Video
    num_readers: int = 0
    is_dropped: bool = False


class Videos:
    """Files under a budget of bytes, each for `ttl_s` after its last use; the least recently used go first."""

    def __init__(
        self, max_bytes: int, ttl_s: float, now: Callable[[], float], forget_clips: Callable[[str, str], None]
    ) -> None:
        self._max_bytes = max_bytes
        self._kept: Lru[tuple[str, str], Kept] = Lru(max_bytes, ttl_s, now, _dropped)
        self._forget_clips = forget_clips

    def keep(self, caller: str, path: Path, facts: Video) -> Video:
        """Take over the file at `path`; a video that is here already begins its time anew, and `path` is deleted.

        Raises VideoTooLarge for one that never fits; the file is then still the caller's.
        """
        key = (caller, facts.id)
        if self._kept.get(key) is not None:
            path.unlink(missing_ok=True)
        elif not self._kept.put(key, Kept(path, facts), max(LEAST_BYTES, facts.bytes)):
            limit = f"{self._max_bytes:,} bytes"
            raise over_limit(f"The video has {facts.bytes:,} bytes", limit, "VIDSPEC_MAX_STORED_BYTES")
        return self.facts(caller, facts.id)

    def facts(self, caller: str, video_id: str) -> Video:
        """What is known of a kept video; asking is no use of it. Raises NotFound."""
        entry = self._kept.peek((caller, video_id))
        if entry is None:
            raise _unknown()
        return _told(entry)

    def all_facts(self, caller: str) -> list[Video]:
        """The caller's videos, most recently used first."""
        return [_told(entry) for (owner, _), entry in reversed(self._kept.items()) if owner == caller]

    @contextmanager
    def reading(self, caller: str, video_id: str) -> Iterator[Kept]:
        """Use a video for the length of the block, in which its file stays, even if it is dropped. Raises NotFound."""
        kept = self._kept.get((caller, video_id))
        if kept is None:
            raise _unknown()
        kept.num_readers += 1
        try:
            yield kept
        finally:
            kept.num_readers -= 1
            _delete_if_done(kept)

    def drop(self, caller: str, video_id: str) -> None:
        """Delete a video and its frames; raises NotFound."""
        self._forget_clips(caller, video_id)
        if not self._kept.drop((caller, video_id)):
            raise _unknown()

    def expire(self) -> None:
        """Delete what is too old."""
        self._kept.expire()

    def close(self) -> None:
        """Delete everything."""
        self._kept.clear()

    @property
    def load(self) -> tuple[int, int]:
        """How many videos are kept, and their bytes."""
        return len(self._kept), self._kept.num_bytes


def _told(entry: Entry[Kept]) -> Video:
    return entry.value.facts.model_copy(update={"expires_at": int(entry.expires_at)})


def _dropped(kept: Kept) -> None:
    kept.is_dropped = True
    _delete_if_done(kept)


def _delete_if_done(kept: Kept) -> None:
    if kept.is_dropped and kept.num_readers == 0:
        kept.path.unlink(missing_ok=True)


def _unknown() -> NotFound:
    return NotFound("No such video is kept for you; it may have expired. Upload it again.", param="video_id")
