"""Intake: the one video of one request, wherever it comes from, and what it holds until its frames are had."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from vidspec_service.api.admission import Place
from vidspec_service.api.clips import VideoFile
from vidspec_service.api.deps import Services
from vidspec_service.api.schemas import Source
from vidspec_service.decoding.source import decode_data_url, write_upload
from vidspec_service.errors import InvalidRequest


class Intake:
    """Takes one video. What it has stored is deleted when it is closed, what it has borrowed is given back."""

    def __init__(self, services: Services, caller: str, place: Place) -> None:
        self.caller = caller
        self.place = place
        self._services = services
        self._held = ExitStack()
        self._file: VideoFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def file(self) -> VideoFile:
        """The video, once taken."""
        if self._file is None:
            raise InvalidRequest("The request has no video.", param="video")
        return self._file

    async def take(self, source: Source) -> None:
        """Take the video that a valid body names; one that came as a file part is here already."""
        if source.video_id is not None:
            kept = self._held.enter_context(self._services.videos.reading(self.caller, source.video_id))
            self._file = VideoFile(kept.path, kept.facts.bytes, kept.facts.id)
        elif source.url is not None:
            async with self._services.fetcher.opened(source.url) as chunks:
                await self.store(self._counted(chunks), is_still=source.is_still)
        elif source.data_url is not None:
            limit = self._services.settings.max_upload_bytes
            content = await asyncio.to_thread(decode_data_url, source.data_url, limit, is_still=source.is_still)
            await self.store(_once(content), is_still=source.is_still)

    async def store(self, chunks: AsyncIterator[bytes], *, is_still: bool = False) -> None:
        """Write a stream to a private file of this request."""
        measured = _Measured(chunks)
        limit = self._services.settings.max_upload_bytes
        path = await write_upload(measured.chunks(), self._services.upload_dir, limit, is_still=is_still)
        self._held.callback(path.unlink, missing_ok=True)
        content_id = f"video-{measured.digest.hexdigest()[:32]}"
        self._file = VideoFile(path, measured.num_bytes, content_id, is_still)

    def hand_over(self) -> VideoFile:
        """The stored file, which somebody else deletes from now on."""
        self._held.pop_all()
        return self.file

    def close(self) -> None:
        """The file is not needed any more. May be called again."""
        self._held.close()
        self.place.release_bytes()

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in chunks:
            num_bytes += len(chunk)
            self.place.hold_bytes(num_bytes)
            yield chunk


class _Measured:
    """Counts and hashes what passes through."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            self.num_bytes += len(chunk)
            self.digest.update(chunk)
            yield chunk


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
