"""A data URL with JPEG images: frames that the client has chosen itself, instead of a video file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from vidspec_service.api.schemas.fields import FrameTimes
from vidspec_service.api.uploads.data_urls import MALFORMED, DataUrl, from_base64
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.api.video_file import VideoFile
from vidspec_service.decoding.clip import FrameSequence, over_limit
from vidspec_service.errors import InvalidRequest, VideoUnsupported
from vidspec_service.settings import Settings

_FRAMES_HEAD = b"data:video/jpeg;base64,"
_JPEG = b"\xff\xd8\xff"
_DEFAULT_FPS = 1.0  # as vLLM has it


async def take_frames(upload: Upload, url: DataUrl, times: FrameTimes | None) -> VideoFile:
    """A client's own frames, `data:video/jpeg;base64,F1,F2,...` as in vLLM: one file of JPEG images in a row.

    No image is decoded here.
    """
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
    text, begin = url.text, url.begin + len(_FRAMES_HEAD)
    if not url.starts_with(_FRAMES_HEAD):
        raise InvalidRequest(f"Frames must be a URL that starts with {_FRAMES_HEAD.decode()}", param="video")
    num_frames = text.count(b",", begin, url.end) + 1
    if num_frames > settings.max_frames:
        raise over_limit(f"There are {num_frames} frames", str(settings.max_frames), "VIDSPEC_MAX_FRAMES")
    num_bytes = (url.end - begin - num_frames + 1) * 3 // 4 - text.count(b"=", begin, url.end)
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
            raise InvalidRequest(f"Frame {index}'s {MALFORMED}", param="video") from None
        if not image.startswith(_JPEG):
            raise VideoUnsupported(f"Frame {index} is not a JPEG image.", param="video")
        images.append(image)
        begin = end + 1
    return images


def _sequence(num_bytes: tuple[int, ...], times: FrameTimes, settings: Settings) -> FrameSequence:
    """The frames' sizes and when each is shown."""
    timestamps_s = tuple(times.timestamps_s or ())
    if times.fps is not None:
        timestamps_s = tuple(index / times.fps for index in range(len(num_bytes)))
    elif len(timestamps_s) != len(num_bytes):
        raise InvalidRequest(
            f"There are {len(num_bytes)} frames but {len(timestamps_s)} timestamps_s.", param="timestamps_s"
        )
    end_s = timestamps_s[-1] if times.fps is None else len(num_bytes) / times.fps
    if end_s > settings.max_duration_s:
        fact = "The last frame is shown at" if times.fps is None else "The frames last"
        raise over_limit(f"{fact} {end_s:.6g} s", f"{settings.max_duration_s:g} s", "VIDSPEC_MAX_DURATION_S")
    return FrameSequence(num_bytes=num_bytes, timestamps_s=timestamps_s, fps=times.fps)
