"""VideoFile: a video or an image of a request, and how errors name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vidspec_service.decoding.clip import FrameSequence
from vidspec_service.errors import RequestError

_VIDEO_FIELDS = ("video", "video_id", "video_url", "timestamps_s")


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video on our disk, under a name of ours."""

    path: Path
    num_bytes: int
    content_id: str  # names the bytes: equal content, equal id
    is_still: bool = False  # an image
    sequence: FrameSequence | None = None  # a client's own frames, one image after the other


def content_id(sha256: str) -> str:
    """The id of bytes, by their digest in hex."""
    return f"video-{sha256[:32]}"


@contextmanager
def about_video(index: int, num_videos: int) -> Iterator[None]:
    """Makes errors name the video they are about, counted from 0; with a single video they stay as they are."""
    try:
        yield
    except RequestError as error:
        if num_videos == 1:
            raise
        name = f"videos.{index}"
        param = name if error.param in (None, *_VIDEO_FIELDS) else error.param
        raise type(error)(f"{name}: {error.message}", param=param) from error
