"""Checks a file's first bytes: unless they begin a container we read, the file is refused before it is decoded."""

from __future__ import annotations

import string

from vidspec_service.errors import VideoUnsupported

HEAD_BYTES = 4096  # an animated PNG may have a palette and a colour profile before it says that it is one
_PNG = b"\x89PNG\r\n\x1a\n"
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"}
_MAGIC = (
    b"\x1aE\xdf\xa3",  # Matroska, WebM
    b"OggS",
    b"\x00\x00\x01\xba",  # MPEG-PS
    b"IMKH",  # the same from Hikvision's recorders, after a header of their own
    b"FLV\x01",
    b"0&\xb2u\x8ef\xcf\x11\xa6\xd9\x00\xaa\x00b\xcel",  # ASF, WMV
    b"\x06\x0e+4\x02\x05\x01\x01\r\x01\x02",  # MXF
    b"GIF87a",
    b"GIF89a",
    b"\x1f\x07\x00",  # DV
)
_FIRST_UNITS_H264 = {6, 7, 9}  # SEI, sequence parameters, delimiter
_FIRST_UNITS_HEVC = {32, 33, 35, 39}  # the same, and video parameters
_VIDEOS = (
    ", not a video. Accepted are MP4/MOV, Matroska/WebM, AVI, MPEG-TS, MPEG-PS, Ogg, FLV, ASF/WMV, MXF, DV, GIF, APNG, "
    "and H.264 and H.265 without a container."
)
_STILLS = ". Accepted as an image are PNG, JPEG and WebP."
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
_STILL_IMAGE_BRANDS = {b"avif", b"heic", b"heix", b"mif1"}
_TEXT = frozenset(string.printable.encode())


def check_signature(head: bytes, *, is_still: bool = False) -> None:
    """Raises VideoUnsupported unless `head`, a file's first HEAD_BYTES or all of it, begins a container we read.

    A client's file name and media type are not used. With `is_still`, nothing but an image is accepted.
    """
    if not (_is_still(head) if is_still else _is_container(head)):
        what = "a video" if is_still and _is_container(head) else _guess(head)
        raise VideoUnsupported(f"The file is {what}{_STILLS if is_still else _VIDEOS}", param="video")


def _is_still(head: bytes) -> bool:
    return head.startswith((_PNG, b"\xff\xd8\xff")) or (
        head[:4] == b"RIFF" and head[8:12] == b"WEBP" and not _is_animated_webp(head)
    )


def _is_container(head: bytes) -> bool:
    if head[4:8] in _MP4_BOXES:
        return head[8:12] not in _STILL_IMAGE_BRANDS
    if head[:4] == b"RIFF":
        return head[8:12] == b"AVI "
    if head.startswith(_PNG):
        return b"acTL" in head.partition(b"IDAT")[0]  # the chunk that only animations have
    return head.startswith(_MAGIC) or _is_transport_stream(head) or _is_bare_stream(head)


def _is_bare_stream(head: bytes) -> bool:
    """H.264 or H.265 by Annex B: a start code, and a unit that a stream begins with."""
    unit = head[4:6] if head.startswith(b"\x00\x00\x00\x01") else head[3:5] if head[:3] == b"\x00\x00\x01" else b""
    if len(unit) < 2 or unit[0] & 0x80:
        return False
    is_hevc = unit[0] >> 1 & 0x3F in _FIRST_UNITS_HEVC and unit[0] & 1 == 0 and unit[1] == 1
    return is_hevc or unit[0] & 0x1F in _FIRST_UNITS_H264


def _is_transport_stream(head: bytes) -> bool:
    """Sync bytes 188 apart, or 192 apart after a 4-byte time code (M2TS)."""
    for start, stride in ((0, 188), (4, 192)):
        syncs = head[start : start + 3 * stride : stride]  # more may be damaged
        if len(syncs) >= 2 and set(syncs) == {0x47}:
            return True
    return False


def _guess(head: bytes) -> str:
    """What a refused file seems to be, for the client who sent it; completes "The file is ..."."""
    for magic, name in _NOT_VIDEO:
        if head.startswith(magic):
            return name
    if _is_animated_webp(head):
        return "an animated WebP image"
    if head[:4] == b"RIFF" and head[8:12] in _RIFF_NOT_VIDEO:
        return _RIFF_NOT_VIDEO[head[8:12]]
    if head[4:8] == b"ftyp" and head[8:12] in _STILL_IMAGE_BRANDS:
        return "a HEIF or AVIF image"
    if head and _TEXT.issuperset(head):
        return "text"
    return "of an unknown kind"


def _is_animated_webp(head: bytes) -> bool:
    """By its extended header; FFmpeg reads none of its frames."""
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) > 20 and bool(head[20] & 2)
