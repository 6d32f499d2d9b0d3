"""Data URLs: a video's or an image's bytes in the text of a body."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator

from vidspec_service.decoding.limits import over_limit
from vidspec_service.errors import InvalidRequest

_DATA_URL = re.compile(r"data:(video|image)/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_DATA_URL_HEAD = 256  # characters in which the comma must come
_BASE64_SLICE = 1024 * 1024  # characters, a multiple of 4


async def once(content: bytes) -> AsyncIterator[bytes]:
    """A stream of one chunk."""
    yield content


def decode_data_url(url: str, max_bytes: int, *, is_still: bool = False) -> bytes:
    """The bytes of a `data:video/...;base64,` (or `image/`) URL; its size is checked before anything is decoded.

    InvalidRequest for anything else, VideoTooLarge over `max_bytes`. Blocks: call it in a thread.
    """
    head = _DATA_URL.match(url, 0, _DATA_URL_HEAD)
    kind = "image" if is_still else "video"
    if head is None or head[1].lower() != kind:
        raise InvalidRequest(f"{kind} must be a URL that starts with data:{kind}/...;base64,", param="video")
    num_bytes = (len(url) - head.end()) * 3 // 4 - url.count("=", -2)
    if num_bytes > max_bytes:
        fact = f"The {kind} has {num_bytes:,} bytes"
        raise over_limit(fact, f"{max_bytes:,} bytes", "VIDSPEC_MAX_UPLOAD_BYTES")
    try:
        return from_base64(url, head.end(), len(url))
    except ValueError:  # not of its alphabet, or badly padded
        raise InvalidRequest(f"The {kind}'s base64 is malformed.", param="video") from None


def from_base64(text: str, begin: int, end: int) -> bytes:
    """What a part of a text stands for; raises ValueError.

    Slice by slice: each holds up every other thread, and 30 MB at once do so for 0.1 s.
    """
    content = bytearray()
    for start in range(begin, end, _BASE64_SLICE):
        stop = min(start + _BASE64_SLICE, end)
        piece = base64.b64decode(text[start:stop], validate=True)
        if stop < end and len(piece) < _BASE64_SLICE * 3 // 4:
            raise ValueError("padding in the middle")
        content += piece
    return bytes(content)
