"""A video that is no part of a form: kept from before, behind an address, or in a data URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from vidspec_service.api.schemas.fields import Source
from vidspec_service.api.store.videos import Videos
from vidspec_service.api.uploads.fetching import Fetcher
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.decoding.source import decode_data_url


async def take(upload: Upload, source: Source, videos: Videos, fetcher: Fetcher) -> None:
    """Bring the video that a valid body names; raises the RequestError that says what is wrong with it."""
    if source.video_id is not None:
        upload.borrow(videos.reading(upload.permit.caller, source.video_id))
    elif source.url is not None:
        async with fetcher.opened(source.url) as chunks:
            await upload.store(upload.counted(chunks), is_still=source.is_still)
    elif source.data_url is not None:
        content = await asyncio.to_thread(decode_data_url, source.data_url, upload.max_bytes, is_still=source.is_still)
        await upload.store(_once(content), is_still=source.is_still)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
