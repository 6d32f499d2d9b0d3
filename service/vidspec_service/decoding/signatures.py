"""What a file's first bytes say it is: refused before it is decoded unless they open a container we read."""

from __future__ import annotations

import string

from vidspec_service.errors import VideoUnsupported

HEAD_BYTES = 512  # enough for three MPEG-TS packets
_NOT_VIDEO = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
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
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"}
_STILL_IMAGE_BRANDS = {b"avif", b"heic", b"heix", b"mif1"}
_TEXT = frozenset(string.printable.encode())
_VIDEOS = ", not a video. Accepted are MP4/MOV, Matroska/WebM, AVI, MPEG-TS, MPEG-PS and Ogg."
_STILLS = ". Accepted as an image are PNG, JPEG and WebP."


def check_signature(head: bytes, *, is_still: bool = False) -> None:
    """VideoUnsupported unless `head`, a file's first HEAD_BYTES or all of it, opens a container we read.

    A client's file name and media type are never asked. `is_still`: an image is expected, and nothing else will do.
    """
    if not (_is_still(head) if is_still else _is_container(head)):
        raise VideoUnsupported(f"The file is {_guess(head)}{_STILLS if is_still else _VIDEOS}", param="video")


def _is_still(head: bytes) -> bool:
    return head.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def _is_container(head: bytes) -> bool:
    if head[4:8] in _MP4_BOXES:
        return head[8:12] not in _STILL_IMAGE_BRANDS
    if head[:4] == b"RIFF":
        return head[8:12] == b"AVI "
    return head[:4] in (b"\x1aE\xdf\xa3", b"OggS", b"\x00\x00\x01\xba") or _is_transport_stream(head)


def _is_transport_stream(head: bytes) -> bool:
    """Sync bytes 188 apart, or 192 apart after a 4-byte time code (M2TS)."""
    for start, stride in ((0, 188), (4, 192)):
        syncs = head[start::stride]
        if len(syncs) >= 2 and set(syncs) == {0x47}:
            return True
    return False


def _guess(head: bytes) -> str:
    for magic, name in _NOT_VIDEO:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] in _RIFF_NOT_VIDEO:
        return _RIFF_NOT_VIDEO[head[8:12]]
    if head[4:8] == b"ftyp" and head[8:12] in _STILL_IMAGE_BRANDS:
        return "a HEIF or AVIF image"
    if _is_container(head):
        return "a video"
    if head and _TEXT.issuperset(head):
        return "text"
    return "of an unknown kind"
