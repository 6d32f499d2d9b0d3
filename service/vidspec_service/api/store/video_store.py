"""VideoStore: uploads kept for more questions, on this server's disk and in a shared store, if there is one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TypeVar

from vidspec_service.api.schemas.fields import VideoFile, content_id
from vidspec_service.api.schemas.videos import Video
from vidspec_service.api.store.local import LocalVideoStore, no_such_video
from vidspec_service.api.store.shared import SharedVideoStore
from vidspec_service.decoding.clip import FrameSequence
from vidspec_service.errors import CapacityError, NotFound, RequestError, VideoUnreadable, VideoUnsupported

_log = logging.getLogger(__name__)

T = TypeVar("T")
Download = Callable[[AsyncIterator[bytes], bool], Awaitable[VideoFile]]
"""Writes bytes to a file on this server; the bool tells whether they are images. Whoever keeps the file deletes it."""


class VideoStore:
    """Without a shared store, keeps videos on this server; with one, files on this server are copies of what it has."""

    def __init__(self, local: LocalVideoStore, shared: SharedVideoStore | None) -> None:
        self._local = local
        self._shared = shared

    async def keep(self, caller: str, file: VideoFile, facts: Video) -> Video:
        """Take over `file`; with a shared store, returns once the store has it.

        Raises VideoTooLarge for a file that can never fit, CapacityError if the store does not answer.
        """
        kept = self._local.keep(caller, file, facts)
        if self._shared is None:
            return kept
        try:
            with self._local.reading(caller, kept.id) as copy:
                await self._shared.put(caller, copy, kept)
            # The store's clock decides for all servers when the video expires.
            return self._or_not_found(caller, kept.id, await self._find(caller, kept.id))
        except BaseException:
            self._delete_local_copy(caller, kept.id)
            raise

    async def facts(self, caller: str, video_id: str) -> Video:
        """What is known of a kept video; this does not count as a use. Raises NotFound, CapacityError."""
        return self._or_not_found(caller, video_id, await self._find(caller, video_id))

    async def page(self, caller: str, after: str | None, limit: int) -> tuple[list[Video], bool]:
        """At most `limit` of the caller's videos, most recently used first, and whether there are more.

        The page begins after the video with the id `after`; raises NotFound if that is not kept, CapacityError.
        """
        ids = self._local.ids(caller) if self._shared is None else await self._shared.ids(caller)
        if after is not None and after not in ids:
            raise no_such_video("after")
        rest = ids if after is None else ids[ids.index(after) + 1 :]
        videos: list[Video] = []
        while rest and not videos:  # some may be gone since they were listed: an empty page would have no `last_id`
            found = await asyncio.gather(*(self._find(caller, each) for each in rest[:limit]))
            videos, rest = [facts for facts in found if facts is not None], rest[limit:]
        return videos, bool(rest)

    async def reading(self, caller: str, video_id: str, download: Download) -> AbstractContextManager[VideoFile]:
        """Use a video: its file stays on this server for the length of the context. Raises NotFound, CapacityError."""
        if self._shared is not None:
            entry = self._or_not_found(caller, video_id, await self._shared.use(caller, video_id))
            if self._local.find(caller, video_id) is None:
                file = await self._copy(self._shared, caller, video_id, entry.sequence, download)
                try:
                    self._local.keep(caller, file, entry.facts)
                except RequestError:
                    file.path.unlink(missing_ok=True)
                    raise
        return self._local.reading(caller, video_id)

    async def _copy(
        self, shared: SharedVideoStore, caller: str, video_id: str, sequence: FrameSequence | None, download: Download
    ) -> VideoFile:
        """A copy here of the store's bytes. Raises NotFound where they are not what the id names.

        Raises VideoUnsupported for a format that only a newer version, which shares the store, can read.
        """
        file = None
        try:
            file = await download(shared.chunks(caller, video_id), sequence is not None)
            if file.content_id == video_id:
                return replace(file, is_still=False, sequence=sequence)
        except VideoUnsupported:
            if await _content_id_of(shared.chunks(caller, video_id)) == video_id:
                raise
        except VideoUnreadable:  # empty
            pass
        if file is not None:
            file.path.unlink(missing_ok=True)
        _log.warning("a kept video's bytes are damaged; it is deleted", extra={"video_id": video_id})
        await shared.delete(caller, video_id)  # as long as it is there, an upload of the same video writes nothing
        raise no_such_video()

    async def delete(self, caller: str, video_id: str) -> None:
        """Delete a video and its frames; raises NotFound, CapacityError."""
        if self._shared is None:
            self._local.delete(caller, video_id)
            return
        self._or_not_found(caller, video_id, await self._find(caller, video_id))
        await self._shared.delete(caller, video_id)
        self._delete_local_copy(caller, video_id)

    def expire(self) -> None:
        """Delete videos here that are too old."""
        self._local.expire()

    async def sweep(self) -> None:
        """Delete videos in the shared store, if there is one, that are too old."""
        if self._shared is not None:
            with suppress(CapacityError):  # it is logged already; the next sweep tries again
                await self._shared.sweep()

    @property
    def usage(self) -> tuple[int, int]:
        """How many videos are kept here, and how many bytes they count for."""
        return self._local.usage

    async def _find(self, caller: str, video_id: str) -> Video | None:
        if self._shared is None:
            return self._local.find(caller, video_id)
        entry = await self._shared.find(caller, video_id)
        return None if entry is None else entry.facts

    def _or_not_found(self, caller: str, video_id: str, found: T | None) -> T:
        """`found`; if None, raises NotFound, and deletes the copy here of a video that the shared store has lost."""
        if found is not None:
            return found
        if self._shared is not None:
            self._delete_local_copy(caller, video_id)
        raise no_such_video()

    def _delete_local_copy(self, caller: str, video_id: str) -> None:
        """Delete the copy here, which may have been evicted already, and its frames."""
        with suppress(NotFound):
            self._local.delete(caller, video_id)


async def _content_id_of(chunks: AsyncIterator[bytes]) -> str:
    digest = hashlib.sha256()
    async for chunk in chunks:
        digest.update(chunk)
    return content_id(digest.hexdigest())
