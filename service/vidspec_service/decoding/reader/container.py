"""A container that FFmpeg may open, under allow-lists; its track to show, and that track's packets.

No other file or address can be reached; FFmpeg's own messages, which may contain them, are not passed on.
Threads are off: concurrency comes from processes, and FFmpeg's threads have deadlocked servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import av

# PyAV would import these for the first file that needs them, when the child can no longer open files.
import av.subtitles.codeccontext
import av.subtitles.stream
import av.subtitles.subtitle
from av.codec.context import Flags, ThreadType
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.reformatter import ColorTrc
from av.video.stream import VideoStream

from vidspec_service.decoding.clip import DecodingLimits
from vidspec_service.decoding.reader.timeline import PacketFacts, clock_jumps, continuous, keyframe_goes_back
from vidspec_service.errors import VideoTooLarge, VideoUnreadable, VideoUnsupported

_MAX_TRACKS = 128  # films on discs have up to a hundred audio and subtitle tracks
_READ_BYTES = 256 * 1024
_DAMAGED = (av.FFmpegError, OSError)  # the latter from a file that is to seek where no file reaches
_HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)


@dataclass(frozen=True, slots=True)
class FileKind:
    """The formats and codecs that FFmpeg may use for a file."""

    formats: str
    codecs: frozenset[str]

    @property
    def decoders(self) -> str:
        """The whitelist of decoders; some have another name than their codec."""
        return ",".join(sorted(self.codecs | {_DECODERS[name] for name in self.codecs & _DECODERS.keys()}))


_DECODERS = {"av1": "libdav1d", "flv1": "flv", "msmpeg4v3": "msmpeg4"}
# The tests render, damage and decode everything listed here; docs/security.md has a table with the reasons.
VIDEO = FileKind(
    "mov,matroska,avi,mpegts,mpeg,ogg,flv,asf,mxf,gif,apng,h264,hevc,dv",
    frozenset(
        [
            "h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores", "theora",
            "flv1", "h263", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2", "dvvideo", "ffv1", "png", "qtrle", "gif", "apng",
        ]
    ),
)  # fmt: skip
# FFmpeg decides by 2 KiB, before which an animation need not have said that it is one.
ANIMATED_PNG = FileKind("apng", frozenset(["apng"]))
RESTARTING = ("mpegts", "mpeg")  # are concatenated by appending files
_STATING = ("matroska,webm", "flv")  # state a duration, but not for each track
_DURATION_TAG = re.compile(r"(\d{2}):(\d{2}):(\d{2}\.\d+)")  # of a Matroska track
_APPENDED = ("matroska,webm", "ogg")  # FFmpeg reads on into a file that was appended
STILLS = {  # by the first byte; FFmpeg does not recognise a JPEG image that another one follows
    b"\x89": FileKind("png_pipe", frozenset(["png"])),
    b"\xff": FileKind("jpeg_pipe", frozenset(["mjpeg"])),
    b"R": FileKind("webp_pipe", frozenset(["webp"])),
}
_STILL_FORMATS = {kind.formats for kind in STILLS.values()}
WHOLE_IMAGE = {"err_detect": "explode"}  # else FFmpeg makes up what is missing of a JPEG image that was cut short


@contextmanager
def open_container(file: BinaryIO, limits: DecodingLimits, kind: FileKind) -> Iterator[InputContainer]:
    """The container in `file`, from its start; closed on leaving."""
    # As container options these also reach the decoders that FFmpeg opens on its own while probing.
    options = {
        "format_whitelist": kind.formats,
        "protocol_whitelist": "none",  # all bytes come from `file`; no other file or address may be opened
        "codec_whitelist": kind.decoders,
        "max_streams": str(_MAX_TRACKS + 1),
        "max_pixels": limits.max_padded_pixels,
    }
    file.seek(0)
    try:
        container = av.open(
            file,
            mode="r",
            format=None if kind is VIDEO else kind.formats,
            options=options,
            metadata_errors="replace",
            buffer_size=_READ_BYTES,
        )
    except MemoryError:  # FFmpeg's answer to too many streams, and to absurd sizes
        raise VideoUnsupported(
            f"The file has more than {_MAX_TRACKS} tracks, or a damaged header.", param="video"
        ) from None
    except _DAMAGED:
        raise VideoUnreadable("The file cannot be opened: it is damaged or incomplete.", param="video") from None
    try:
        # FFmpeg leaves out tracks over its limit, and some formats then no longer know where their packets are.
        if len(container.streams) > _MAX_TRACKS:
            raise VideoUnsupported(f"The file has more than {_MAX_TRACKS} tracks.", param="video")
        yield container
    finally:
        container.close()  # at once: reference cycles would keep it for long


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translates FFmpeg's errors in the block to ours."""
    try:
        yield
    except MemoryError:  # first: PyAV's MemoryError is an FFmpegError too
        raise VideoTooLarge("Decoding needs more memory than one video may use.", param="video") from None
    except av.FFmpegError:
        raise VideoUnreadable("The video is damaged: it cannot be decoded.", param="video") from None


def select_stream(container: InputContainer, limits: DecodingLimits, kind: FileKind) -> VideoStream:
    """The track to show, ready to decode; every other track is switched off."""
    tracks = _tracks(container)
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
    limits.check_pixels(codec.width, codec.height)
    codec.options = {"max_pixels": limits.max_padded_pixels, "codec_whitelist": kind.decoders}
    if kind is not VIDEO:
        codec.options |= WHOLE_IMAGE
    codec.flags |= Flags.unaligned  # else FFmpeg crops too little at the left, for aligned lines
    codec.thread_type = ThreadType.NONE
    codec.thread_count = 1
    for other in container.streams:
        if other is not stream:
            other.discard = Discard.all
    return stream


def _tracks(container: InputContainer) -> list[VideoStream]:
    """The video tracks, without cover pictures."""
    return [track for track in container.streams.video if not track.disposition & Disposition.attached_pic]


def container_warnings(container: InputContainer, stream: VideoStream) -> list[str]:
    """Warnings that a person should know before trusting an answer about the file."""
    warnings = []
    if container.streams.audio:
        warnings.append("Audio is ignored.")
    if len(_tracks(container)) > 1:
        warnings.append(
            f"The file has several video tracks; the one with {stream.width}x{stream.height} pixels is used."
        )
    if stream.sample_aspect_ratio and stream.sample_aspect_ratio != 1:
        warnings.append(f"Pixels are not square ({stream.sample_aspect_ratio}); frames are used as stored.")
    if stream.codec_context.color_trc in _HDR:
        warnings.append("HDR colours are converted without tone mapping.")
    return warnings


def stated_duration_s(container: InputContainer, stream: VideoStream) -> float:
    """How long the file says that the video lasts; 0 if it does not, or only guesses from its own length."""
    name = container.format.name
    if name in RESTARTING or not stream.time_base:
        return 0.0
    if name == "avi":  # of a file that was cut off FFmpeg corrects the duration, not the number of frames
        return float(stream.frames / stream.average_rate) if stream.average_rate else 0.0
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if tag := _DURATION_TAG.match(stream.metadata.get("DURATION", "")):
        hours, minutes, seconds = tag.groups()
        return 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)
    # A container's duration is that of its longest track, which may be sound.
    is_alone = name in _STATING and len(container.streams) == 1
    return (container.duration or 0) / av.time_base if is_alone else 0.0


def states_display_times(container: InputContainer, stream: VideoStream, packets: Sequence[PacketFacts]) -> bool:
    """Whether frames show at the packets' times; if not, FFmpeg derived these, wrongly if frames are reordered."""
    codec, name = stream.codec_context, container.format.name
    is_avi_track = name == "matroska,webm" and codec.codec_tag.strip("\0")  # V_MS/VFW/FOURCC
    is_unsorted = name == "mxf" and codec.has_b_frames and all(packet.pts == packet.dts for packet in packets)
    return codec.codec.intra_only or not (is_avi_track or is_unsorted or name in ("avi", "asf"))


def packets_of(container: InputContainer, stream: VideoStream, warnings: list[str]) -> Iterator[Packet[VideoStream]]:
    """The stream's packets up to the end or the first damage in the container; the same on every walk."""
    packets = container.demux(stream)
    try:
        if container.format.name in RESTARTING and stream.time_base:
            packets = continuous(packets, clock_jumps(stream.time_base))
        elif container.format.name in _APPENDED:
            packets = continuous(packets, keyframe_goes_back())
        for packet in packets:
            if packet.size:  # an empty one would tell the decoder that the stream is over
                yield packet
                if container.format.name in _STILL_FORMATS:  # phones put previews and brightness maps after the image
                    return
    except MemoryError:
        raise
    except IndexError:  # from PyAV, after the last packet, if a track appeared on the way
        return
    except _DAMAGED:
        warnings.append("The file is damaged; nothing after the damage is used.")
