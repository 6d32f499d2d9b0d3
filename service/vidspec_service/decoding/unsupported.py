"""What a file that is refused seems to be, for the client who sent it: told by its first bytes."""

from __future__ import annotations

import string

_NOT_VIDEO = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"BM", "a BMP image"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"ID3", "an MP3 audio file"),
    (b"fLaC", "a FLAC audio file"),
    (b"#EXTM3U", "a playlist"),
    (b"ffconcat", "a playlist"),
)
_RIFF_NOT_VIDEO = {b"WAVE": "a WAV audio file", b"WEBP": "a WebP image"}
STILL_IMAGE_BRANDS = {b"avif", b"heic", b"heix", b"mif1"}
_TEXT = frozenset(string.printable.encode())


def guess(head: bytes) -> str:
    """Of whatever opens no container that we read; completes "The file is ..."."""
    for magic, name in _NOT_VIDEO:
        if head.startswith(magic):
            return name
    if is_animated_webp(head):
        return "an animated WebP image"
    if head[:4] == b"RIFF" and head[8:12] in _RIFF_NOT_VIDEO:
        return _RIFF_NOT_VIDEO[head[8:12]]
    if head[4:8] == b"ftyp" and head[8:12] in STILL_IMAGE_BRANDS:
        return "a HEIF or AVIF image"
    if head and _TEXT.issuperset(head):
        return "text"
    return "of an unknown kind"


def is_animated_webp(head: bytes) -> bool:
    """By its extended header; FFmpeg reads none of its frames."""
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) > 20 and bool(head[20] & 2)
