"""Data URLs: a video, an image or a client's own frames as base64 in the text of a body."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from vidspec_service.api.schemas.fields import FrameTimes
from vidspec_service.decoding.clip import FrameSequence, over_limit
from vidspec_service.errors import InvalidRequest, VideoUnsupported
from vidspec_service.settings import Settings

# `application`: browsers and LangChain say so (`octet-stream`, `pdf`) of files whose kind they do not know
_HEAD = re.compile(rb"data:(video|image|application)/[\w.+-]+(?:;[\w.+-]+=[^;]*)*;base64,", re.IGNORECASE)
_HEAD_BYTES = 256  # within which it ends; a browser's recording has commas in it: video/webm;codecs=vp8,opus
_FRAMES_HEAD = b"data:video/jpeg;base64,"
_JPEG = b"\xff\xd8\xff"
_DEFAULT_FPS = 1.0  # of a client's own frames, as vLLM has it
_MALFORMED = "base64 is malformed: it must be padded, without line breaks or spaces, of the letters of RFC 4648."
# All other threads wait while a slice is decoded, and 30 MB at once would take 0.1 s.
_SLICE = 1024 * 1024  # characters of base64, a multiple of 4


@dataclass(frozen=True, slots=True)
class DataUrl:
    """A part of `text`, which may be a whole body: megabytes are not copied."""

    text: bytes | bytearray
    begin: int
    end: int

    @classmethod
    def of(cls, url: str) -> DataUrl:
        """A data URL that is the whole of `url`."""
        text = url.encode("ascii", "replace")
        return cls(text, 0, len(text))

    def _starts_with(self, head: bytes) -> bool:
        """Whether the URL begins with `head`, which is lower case; the URL's own case does not matter."""
        return bytes(self.text[self.begin : min(self.end, self.begin + len(head))]).lower() == head

    async def decoded(self, max_bytes: int, *, is_still: bool) -> AsyncIterator[bytes]:
        """The bytes of a `data:video/...;base64,` (or `image/`, or `application/`) URL, piece by piece.

        Raises InvalidRequest for anything else; VideoTooLarge over `max_bytes`, before anything is decoded.
        """
        kind = "image" if is_still else "video"
        head = _HEAD.match(self.text, self.begin, min(self.end, self.begin + _HEAD_BYTES))
        if head is None or head[1].decode().lower() not in (kind, "application"):
            raise InvalidRequest(f"{kind} must be a URL that starts with data:{kind}/...;base64,", param="video")
        num_padding = self.text.count(b"=", self.end - 2, self.end)
        num_bytes = (self.end - head.end()) * 3 // 4 - num_padding
        if num_bytes > max_bytes:
            raise over_limit(f"The {kind} has {num_bytes:,} bytes", f"{max_bytes:,} bytes", "VIDSPEC_MAX_UPLOAD_BYTES")
        try:
            for start in range(head.end(), self.end, _SLICE):
                yield await asyncio.to_thread(_piece, self.text, start, self.end)
        except ValueError:  # characters outside the alphabet, or bad padding
            raise InvalidRequest(f"The {kind}'s {_MALFORMED}", param="video") from None

    @property
    def has_frames(self) -> bool:
        """Whether these are frames that the client has chosen itself, `data:video/jpeg;base64,F1,F2,...` as in vLLM."""
        return self._starts_with(b"data:video/jpeg;")

    def frames(self, settings: Settings) -> list[bytes]:
        """A client's own frames. Blocks: call it in a thread.

        Their number and size are checked before anything is decoded; no image is decoded here.
        """
        text, begin = self.text, self.begin + len(_FRAMES_HEAD)
        if not self._starts_with(_FRAMES_HEAD):
            raise InvalidRequest(f"Frames must be a URL that starts with {_FRAMES_HEAD.decode()}", param="video")
        num_frames = text.count(b",", begin, self.end) + 1
        if num_frames > settings.max_frames:
            raise over_limit(f"There are {num_frames} frames", str(settings.max_frames), "VIDSPEC_MAX_FRAMES")
        num_bytes = (self.end - begin - num_frames + 1) * 3 // 4 - text.count(b"=", begin, self.end)
        if num_bytes > settings.max_upload_bytes:
            limit = f"{settings.max_upload_bytes:,} bytes"
            raise over_limit(f"The frames have {num_bytes:,} bytes", limit, "VIDSPEC_MAX_UPLOAD_BYTES")
        images = []
        for index in range(num_frames):
            end = text.find(b",", begin, self.end)
            end = self.end if end < 0 else end
            try:
                image = b"".join(_piece(text, start, end) for start in range(begin, end, _SLICE))
            except ValueError:
                raise InvalidRequest(f"Frame {index}'s {_MALFORMED}", param="video") from None
            if not image.startswith(_JPEG):
                raise VideoUnsupported(f"Frame {index} is not a JPEG image.", param="video")
            images.append(image)
            begin = end + 1
        return images


def frame_sequence(num_bytes: tuple[int, ...], times: FrameTimes | None, settings: Settings) -> FrameSequence:
    """The sizes of a client's own frames, and when each is shown."""
    times = times or FrameTimes(fps=_DEFAULT_FPS, timestamps_s=None)
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


def _piece(text: bytes | bytearray, start: int, end: int) -> bytes:
    """The bytes that the slice from `start` encodes; raises ValueError."""
    stop = min(start + _SLICE, end)
    piece = base64.b64decode(text[start:stop], validate=True)
    if stop < end and len(piece) < _SLICE * 3 // 4:
        raise ValueError("padding in the middle")
    return piece
