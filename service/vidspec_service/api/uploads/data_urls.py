"""Data URLs: a video or an image as base64 in the text of a body."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from vidspec_service.decoding.clip import over_limit
from vidspec_service.errors import InvalidRequest

# `application`: browsers and LangChain say so (`octet-stream`, `pdf`) of files whose kind they do not know
_HEAD = re.compile(rb"data:(video|image|application)/[\w.+-]+(?:;[\w.+-]+=[^;]*)*;base64,", re.IGNORECASE)
_HEAD_BYTES = 256  # within which it ends; a browser's recording has commas in it: video/webm;codecs=vp8,opus
MALFORMED = "base64 is malformed: it must be padded, without line breaks or spaces, of the letters of RFC 4648."
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

    def starts_with(self, head: bytes) -> bool:
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
            raise InvalidRequest(f"The {kind}'s {MALFORMED}", param="video") from None


def from_base64(text: bytes | bytearray, begin: int, end: int) -> bytes:
    """The bytes that a part of a text encodes; raises ValueError. Blocks: call it in a thread.

    Decodes slice by slice: all other threads wait while one is decoded, and 30 MB at once would take 0.1 s.
    """
    return b"".join(_piece(text, start, end) for start in range(begin, end, _SLICE))


def _piece(text: bytes | bytearray, start: int, end: int) -> bytes:
    """The bytes that the slice from `start` encodes; raises ValueError."""
    stop = min(start + _SLICE, end)
    piece = base64.b64decode(text[start:stop], validate=True)
    if stop < end and len(piece) < _SLICE * 3 // 4:
        raise ValueError("padding in the middle")
    return piece
