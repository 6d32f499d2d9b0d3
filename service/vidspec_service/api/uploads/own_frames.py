"""A client's own frames: `data:video/jpeg;base64,F1,F2,...`, as vLLM takes them. No image is decoded here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from vidspec_service.api.schemas.fields import FrameTimes
from vidspec_service.api.store.clips import VideoFile
from vidspec_service.api.uploads.data_urls import DataUrl, from_base64
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.decoding.clip import FrameSequence
from vidspec_service.decoding.limits import over_limit
from vidspec_service.errors import InvalidRequest, VideoUnsupported
from vidspec_service.settings import Settings

HEAD = b"data:video/jpeg;base64,"
_JPEG = b"\xff\xd8\xff"
_DEFAULT_FPS = 1.0  # as vLLM has it


async def take_frames(upload: Upload, url: DataUrl, times: FrameTimes | None) -> VideoFile:
    """Store the images one after the other; raises the RequestError that says what is wrong with them."""
    images = await asyncio.to_thread(_images, url, upload.settings)
    times = times or FrameTimes(fps=_DEFAULT_FPS, timestamps_s=None)
    sequence = _sequence(tuple(map(len, images)), times, upload.settings)
    file = await upload.store(_each(images), is_still=True)
    return replace(file, is_still=False, sequence=sequence)


async def _each(images: Sequence[bytes]) -> AsyncIterator[bytes]:
    for image in images:
        yield image


def _images(url: DataUrl, settings: Settings) -> list[bytes]:
    """The frames' bytes. Their number and size are checked before anything is decoded. Blocks."""
    text, begin = url.text, url.begin + len(HEAD)
    if not url.starts_with(HEAD):
        raise InvalidRequest(f"Frames must be a URL that starts with {HEAD.decode()}", param="video")
    num_frames = text.count(b",", begin, url.end) + 1
    if num_frames > settings.max_frames:
        raise over_limit(f"There are {num_frames} frames", str(settings.max_frames), "VIDSPEC_MAX_FRAMES")
    num_bytes = (url.end - begin) * 3 // 4
    if num_bytes > settings.max_upload_bytes:
        limit = f"{settings.max_upload_bytes:,} bytes"
        raise over_limit(f"The frames have {num_bytes:,} bytes", limit, "VIDSPEC_MAX_UPLOAD_BYTES")
    images = []
    for index in range(num_frames):
        end = text.find(b",", begin, url.end)
        end = url.end if end < 0 else end
        try:
            image = from_base64(text, begin, end)
        except ValueError:
            raise InvalidRequest(f"Frame {index}'s base64 is malformed.", param="video") from None
        if not image.startswith(_JPEG):
            raise VideoUnsupported(f"Frame {index} is no JPEG image.", param="video")
        images.append(image)
        begin = end + 1
    return images


def _sequence(num_bytes: tuple[int, ...], times: FrameTimes, settings: Settings) -> FrameSequence:
    """When each is shown."""
    timestamps_s = tuple(times.timestamps_s or ())
    if times.fps is not None:
        timestamps_s = tuple(index / times.fps for index in range(len(num_bytes)))
    elif len(timestamps_s) != len(num_bytes):
        raise InvalidRequest(
            f"There are {len(num_bytes)} frames and {len(timestamps_s)} timestamps_s.", param="timestamps_s"
        )
    if timestamps_s[-1] > settings.max_duration_s:
        limit = f"{settings.max_duration_s:g} s"
        raise over_limit(f"The last frame is shown at {timestamps_s[-1]:.1f} s", limit, "VIDSPEC_MAX_DURATION_S")
    return FrameSequence(num_bytes=num_bytes, timestamps_s=timestamps_s, fps=times.fps)
