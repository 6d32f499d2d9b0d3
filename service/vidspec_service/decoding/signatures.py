"""What a file's first bytes say it is: refused before it is decoded unless they open a container we read."""

from __future__ import annotations

from vidspec_service.decoding.unsupported import STILL_IMAGE_BRANDS, guess
from vidspec_service.errors import VideoUnsupported

HEAD_BYTES = 512  # enough for three MPEG-TS packets
_MP4_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"}
_VIDEOS = ", not a video. Accepted are MP4/MOV, Matroska/WebM, AVI, MPEG-TS, MPEG-PS and Ogg."
_STILLS = ". Accepted as an image are PNG, JPEG and WebP."


def check_signature(head: bytes, *, is_still: bool = False) -> None:
    """VideoUnsupported unless `head`, a file's first HEAD_BYTES or all of it, opens a container we read.

    A client's file name and media type are never asked. `is_still`: an image is expected, and nothing else will do.
    """
    if not (_is_still(head) if is_still else _is_container(head)):
        what = "a video" if is_still and _is_container(head) else guess(head)
        raise VideoUnsupported(f"The file is {what}{_STILLS if is_still else _VIDEOS}", param="video")


def _is_still(head: bytes) -> bool:
    return head.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def _is_container(head: bytes) -> bool:
    if head[4:8] in _MP4_BOXES:
        return head[8:12] not in STILL_IMAGE_BRANDS
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
