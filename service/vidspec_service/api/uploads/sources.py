"""The videos that a body names: files of its form, kept videos, URLs to fetch, or data URLs."""

from __future__ import annotations

from collections.abc import Sequence

from vidspec_service.api.schemas.fields import VideoSource
from vidspec_service.api.store.video_store import VideoStore
from vidspec_service.api.uploads.fetching import Fetcher
from vidspec_service.api.uploads.own_frames import take_frames
from vidspec_service.api.uploads.upload import Upload, check_num_videos
from vidspec_service.api.video_file import VideoFile, about_video
from vidspec_service.errors import InvalidRequest


async def resolve_sources(
    upload: Upload, sources: Sequence[VideoSource], videos: VideoStore, fetcher: Fetcher
) -> list[VideoFile]:
    """Get every video that a valid body names, one after the other. Errors of `resolve_source` name the video."""
    check_num_videos(len(sources), upload.settings)
    files = []
    for index, source in enumerate(sources):
        with about_video(index, len(sources)):
            files.append(await resolve_source(upload, source, videos, fetcher))
    return files


async def resolve_source(upload: Upload, source: VideoSource, videos: VideoStore, fetcher: Fetcher) -> VideoFile:
    """Get the video that a valid body names; raises the RequestError that says what is wrong with it."""
    if source.file is not None:
        return source.file
    data_url = None if source.data_url is None else upload.data_url(source.data_url)
    if data_url is not None and data_url.starts_with(b"data:video/jpeg;") and not source.is_still:
        return await take_frames(upload, data_url, source.times)
    if source.times is not None:
        raise InvalidRequest("fps and timestamps_s of frames need a data:video/jpeg;base64, URL.", param="video")
    if source.video_id is not None:
        return upload.borrow(await videos.reading(upload.permit.caller, source.video_id, upload.download))
    if data_url is not None:
        chunks = data_url.decoded(upload.settings.max_upload_bytes, is_still=source.is_still)
        return await upload.store(chunks, is_still=source.is_still)
    assert source.url is not None
    async with fetcher.opened(source.url) as chunks:
        return await upload.store(upload.counted(chunks), is_still=source.is_still)
