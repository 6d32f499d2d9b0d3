"""Opens a container under allow-lists and picks its video track; no other file or address can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import av

# PyAV would import these over the first file that needs them, when the child can open no file any more.
import av.subtitles.codeccontext
import av.subtitles.stream
import av.subtitles.subtitle
from av.codec.context import ThreadType
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.reformatter import ColorTrc
from av.video.stream import VideoStream

from vidspec_service.decoding.limits import DecodingLimits, over_limit
from vidspec_service.errors import VideoUnreadable, VideoUnsupported

MAX_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """What FFmpeg may take a file for."""

    formats: str
    codecs: frozenset[str]

    @property
    def decoders(self) -> str:
        """As a whitelist; AV1 has a decoder of another name."""
        return ",".join(sorted(self.codecs | {"libdav1d"} if "av1" in self.codecs else self.codecs))


VIDEO = Kind(
    "mov,matroska,avi,mpegts,mpeg,ogg",
    frozenset(["h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores", "theora"]),
)
STILL = Kind("png_pipe,jpeg_pipe,webp_pipe", frozenset(["png", "mjpeg", "webp"]))
_FIXED_LIBAVFORMAT = (62, 12, 100)  # of FFmpeg 8.1
_READ_BYTES = 256 * 1024
_HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)


def is_ffmpeg_fixed() -> bool:
    """Whether FFmpeg is 8.1 or newer: before, crafted files wrote out of bounds (CVE-2026-40962, CVE-2025-9951)."""
    return bool(av.library_versions["libavformat"] >= _FIXED_LIBAVFORMAT)


@contextmanager
def opened(file: BinaryIO, limits: DecodingLimits, kind: Kind = VIDEO) -> Iterator[InputContainer]:
    """The container in `file`, from its start; closed on leaving."""
    # As container options these also reach the decoders that FFmpeg opens on its own while probing.
    options = {
        "format_whitelist": kind.formats,
        "protocol_whitelist": "none",  # all bytes come from `file`; no other file or address may be opened
        "codec_whitelist": kind.decoders,
        "max_streams": str(MAX_STREAMS),
        "max_pixels": str(limits.max_pixels),
        "threads": "1",
    }
    file.seek(0)
    try:
        container = av.open(file, mode="r", options=options, metadata_errors="replace", buffer_size=_READ_BYTES)
    except MemoryError:  # FFmpeg's answer to too many streams, and to absurd sizes
        raise VideoUnsupported(
            f"The file has more than {MAX_STREAMS} tracks, or a damaged header.", param="video"
        ) from None
    except av.FFmpegError:
        raise VideoUnreadable("The file cannot be opened: it is damaged or incomplete.", param="video") from None
    try:
        yield container
    finally:
        container.close()  # reference cycles would keep it for long


def video_stream(container: InputContainer, limits: DecodingLimits, kind: Kind = VIDEO) -> VideoStream:
    """The track to show, ready to decode; every other track is switched off."""
    tracks = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not tracks:
        what = "only audio" if container.streams.audio else "no video track"
        raise VideoUnreadable(f"The file has {what}.", param="video")
    best = container.streams.best("video")
    stream = next((track for track in tracks if track is best), tracks[0])
    codec = stream.codec_context
    name = codec.codec.canonical_name if codec else "unknown"
    if name not in kind.codecs:
        accepted = ", ".join(sorted(kind.codecs))
        raise VideoUnsupported(f"The video codec is {name}; accepted are {accepted}.", param="video")
    check_pixels(codec.width, codec.height, limits)
    codec.options = {"max_pixels": str(limits.max_pixels), "codec_whitelist": kind.decoders}
    codec.thread_type = ThreadType.NONE
    codec.thread_count = 1
    for other in container.streams:
        if other is not stream:
            other.discard = Discard.all
    return stream


def check_pixels(width: int, height: int, limits: DecodingLimits) -> None:
    """VideoTooLarge for a frame over the limit."""
    if width * height > limits.max_pixels:
        fact = f"A frame has {width}x{height} = {width * height:,} pixels"
        raise over_limit(fact, f"{limits.max_pixels:,}", "VIDSPEC_MAX_PIXELS")


def describe(container: InputContainer, stream: VideoStream) -> list[str]:
    """What a person should know about the file before trusting an answer about it."""
    warnings = []
    if container.streams.audio:
        warnings.append("Audio is ignored.")
    if len(container.streams.video) > 1:
        warnings.append(f"Of several video tracks, the one of {stream.width}x{stream.height} pixels is used.")
    if stream.sample_aspect_ratio and stream.sample_aspect_ratio != 1:
        warnings.append(f"Pixels are not square ({stream.sample_aspect_ratio}); frames are used as stored.")
    if stream.codec_context.color_trc in _HDR:
        warnings.append("HDR colours are converted without tone mapping.")
    return warnings


def packets_of(container: InputContainer, stream: VideoStream, warnings: list[str]) -> Iterator[Packet[VideoStream]]:
    """The stream's packets up to the end or the first damage in the container; the same on every walk."""
    try:
        for packet in container.demux(stream):
            if packet.size:  # an empty one would tell the decoder that the stream is over
                yield packet
    except MemoryError:
        raise
    except IndexError:  # PyAV, after the last packet, over a track that appeared on the way
        return
    except av.FFmpegError:
        warnings.append("The file is damaged; nothing after the damage is used.")
