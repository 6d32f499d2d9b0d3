"""KeptVideos: uploads that are kept for more questions, on this server's disk and where several servers share them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TypeVar

from vidspec_service.api.schemas.videos import Video
from vidspec_service.api.store.clips import VideoFile
from vidspec_service.api.store.shared import SharedStore
from vidspec_service.api.store.videos import Videos, no_such_video
from vidspec_service.errors import CapacityError, NotFound, RequestError

T = TypeVar("T")
Bring = Callable[[AsyncIterator[bytes], bool], Awaitable[VideoFile]]
"""Writes bytes to a file here, of a still or not; whoever keeps it deletes it."""


class KeptVideos:
    """With a shared store, that is the truth, and what lies here is a copy: asked for, or brought for a question."""

    def __init__(self, here: Videos, shared: SharedStore | None) -> None:
        self._here = here
        self._shared = shared

    async def keep(self, caller: str, file: VideoFile, facts: Video) -> Video:
        """Take over `file`, once that is sure. Raises VideoTooLarge for one that never fits, CapacityError."""
        kept = self._here.keep(caller, file, facts)
        if self._shared is None:
            return kept
        try:
            with self._here.reading(caller, kept.id) as copy:
                await self._shared.put(caller, copy, kept)
            # When it expires the store's clock says, to everybody.
            return self._of(caller, kept.id, await self._find(caller, kept.id))
        except BaseException:
            self._let_go(caller, kept.id)
            raise

    async def facts(self, caller: str, video_id: str) -> Video:
        """What is known of a kept video; asking is no use of it. Raises NotFound, CapacityError."""
        return self._of(caller, video_id, await self._find(caller, video_id))

    async def page(self, caller: str, after: str | None, limit: int) -> tuple[list[Video], bool]:
        """At most `limit` of the caller's videos, most recently used first, and whether there are more.

        They begin after the one with the id `after`; raises NotFound if that is not kept, CapacityError.
        """
        ids = self._here.ids(caller) if self._shared is None else await self._shared.ids(caller)
        if after is not None and after not in ids:
            raise no_such_video("after")
        start = 0 if after is None else ids.index(after) + 1
        found = await asyncio.gather(*(self._find(caller, each) for each in ids[start : start + limit]))
        return [facts for facts in found if facts is not None], start + limit < len(ids)

    async def reading(self, caller: str, video_id: str, bring: Bring) -> AbstractContextManager[VideoFile]:
        """A use of a video, in which its file stays here. Raises NotFound, CapacityError."""
        if self._shared is not None:
            entry = self._of(caller, video_id, await self._shared.use(caller, video_id))
            if self._here.find(caller, video_id) is None:
                file = await bring(self._shared.chunks(caller, video_id), entry.is_still or entry.sequence is not None)
                try:
                    file = replace(file, is_still=entry.is_still, sequence=entry.sequence)
                    self._here.keep(caller, file, entry.facts)
                except RequestError:
                    file.path.unlink(missing_ok=True)
                    raise
        return self._here.reading(caller, video_id)

    async def drop(self, caller: str, video_id: str) -> None:
        """Delete a video and its frames; raises NotFound, CapacityError."""
        if self._shared is None:
            self._here.drop(caller, video_id)
            return
        self._of(caller, video_id, await self._find(caller, video_id))
        await self._shared.drop(caller, video_id)
        self._let_go(caller, video_id)

    def expire(self) -> None:
        """Delete what is too old here."""
        self._here.expire()

    async def sweep(self) -> None:
        """Delete what is too old where it is shared, if anything is."""
        if self._shared is not None:
            with suppress(CapacityError):  # it is in the log; another time
                await self._shared.sweep()

    def close(self) -> None:
        """Delete what lies here."""
        self._here.close()

    @property
    def load(self) -> tuple[int, int]:
        """How many videos lie here, and what they count for in bytes."""
        return self._here.load

    async def _find(self, caller: str, video_id: str) -> Video | None:
        if self._shared is None:
            return self._here.find(caller, video_id)
        entry = await self._shared.find(caller, video_id)
        return None if entry is None else entry.facts

    def _of(self, caller: str, video_id: str, found: T | None) -> T:
        """What is gone where it is shared goes here as well."""
        if found is not None:
            return found
        if self._shared is not None:
            self._let_go(caller, video_id)
        raise no_such_video()

    def _let_go(self, caller: str, video_id: str) -> None:
        """Of the copy here, which may have had to make room meanwhile, and of its frames."""
        with suppress(NotFound):
            self._here.drop(caller, video_id)
