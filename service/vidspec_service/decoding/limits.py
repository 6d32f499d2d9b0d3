"""What is refused before it is decoded: a file whose first bytes are no video's, and a video over a limit."""

from __future__ import annotations

import string
from dataclasses import dataclass

from vidspec_service.errors import VideoTooLarge, VideoUnsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """How much video one request may cost; checked before memory is allocated."""

    max_bytes: int = 256 * 1024 * 1024
    max_duration_s: float = 3600.0
    max_pixels: int = 4096 * 2304  # width x height of one source frame
    max_frame_pixels: int = 1024 * 1024  # larger frames are scaled down to this, aspect kept: models see less
    max_source_frames: int = 250_000  # packets walked in the timestamp scan
    max_frames: int = 768  # frames handed to the model
    max_decoded_bytes: int = 512 * 1024 * 1024  # chosen frames x pixels x 3
    timeout_s: float = 60.0  # wall clock of one decode child

    def check_pixels(self, width: int, height: int) -> None:
        """VideoTooLarge for a frame over the limit."""
        if width * height > self.max_pixels:
            fact = f"A frame has {width}x{height} = {width * height:,} pixels"
            raise over_limit(fact, f"{self.max_pixels:,}", "VIDSPEC_MAX_PIXELS")

    def check_decoded_bytes(self, num_frames: int, width: int, height: int) -> int:
        """Bytes that so many RGB frames take; VideoTooLarge if over the limit."""
        needed = num_frames * width * height * 3
        if needed > self.max_decoded_bytes:
            fitting = self.max_decoded_bytes // (width * height * 3)
            fact = f"{num_frames} frames of {width}x{height} pixels take {needed:,} bytes ({fitting} would fit)"
            raise over_limit(fact, f"{self.max_decoded_bytes:,}", "VIDSPEC_MAX_DECODED_BYTES")
        return needed


def over_limit(fact: str, limit: str, setting: str, *, param: str = "video") -> VideoTooLarge:
    """The one wording of every refusal for size: what it is, what is allowed, what to change."""
    return VideoTooLarge(f"{fact}; the limit is {limit} ({setting}).", param=param)


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
