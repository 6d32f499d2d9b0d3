"""The only reader of video files: an open file in, chosen frames out, upright, in RGB, with exact timestamps.

Runs in a decode child. FFmpeg's own messages, which may contain paths and addresses, are not passed on. A container is
opened under allow-lists; no other file or address can be reached.

1. The file is opened twice: once to scan every packet's timestamp, once to decode. There is no seeking:
   walking packets is nearly free, and packet n of the second walk *is* packet n of the first in every
   container, while a seek lands differently in each. Packets that no chosen frame needs are not decoded.
2. Threads are off everywhere: concurrency comes from processes, and FFmpeg's threads have deadlocked servers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

import av

# PyAV would import these for the first file that needs them, when the child can no longer open files.
import av.subtitles.codeccontext
import av.subtitles.stream
import av.subtitles.subtitle
from av.codec.context import ThreadType
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import ColorTrc
from av.video.stream import VideoStream

from vidspec_service.decoding.clip import WHOLE, Decoded, FrameRequest, Part
from vidspec_service.decoding.limits import DecodingLimits, over_limit
from vidspec_service.decoding.reader.frames import (
    Allocate,
    FrameConverter,
    NoEntryPoint,
    chosen_frames,
    fitted_size,
)
from vidspec_service.decoding.reader.timeline import PacketFacts, Timeline, build_timeline
from vidspec_service.decoding.selection import FramePicker, select_frames
from vidspec_service.decoding.signatures import HEAD_BYTES, check_signature
from vidspec_service.errors import VideoTooLarge, VideoUnreadable, VideoUnsupported

_MAX_TRACKS = 128  # films on discs have up to a hundred audio and subtitle tracks


@dataclass(frozen=True, slots=True)
class _Kind:
    """The formats and codecs that FFmpeg may use for a file."""

    formats: str
    codecs: frozenset[str]

    @property
    def decoders(self) -> str:
        """The whitelist of decoders; some have another name than their codec."""
        return ",".join(sorted(self.codecs | {_DECODERS[name] for name in self.codecs & _DECODERS.keys()}))


_DECODERS = {"av1": "libdav1d", "flv1": "flv", "msmpeg4v3": "msmpeg4"}
# The tests render, damage and decode everything listed here; docs/security.md has a table with the reasons.
_VIDEO = _Kind(
    "mov,matroska,avi,mpegts,mpeg,ogg,flv,asf,mxf,gif,apng,h264,hevc,dv",
    frozenset(
        [
            "h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores", "theora",
            "flv1", "h263", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2", "dvvideo", "ffv1", "png", "qtrle", "gif", "apng",
        ]
    ),
)  # fmt: skip
_TIMELESS = ("h264", "hevc")  # streams without a container
_UNORDERED = ("avi", "asf")  # have no display times: those that FFmpeg derives are wrong if frames are reordered
_RESTARTING = ("mpegts", "mpeg")  # are joined by appending files: the clock may start anew anywhere
_APPENDED = ("matroska,webm", "ogg")  # FFmpeg reads on into a file that was appended, whose clock begins at zero again
_MOST_BACK_S, _MOST_AHEAD_S = 0.1, 60.0  # from packet to packet; beyond, the clock has started anew
_STILLS = {  # by the first byte; FFmpeg does not recognise a JPEG image that another one follows
    b"\x89": _Kind("png_pipe", frozenset(["png"])),
    b"\xff": _Kind("jpeg_pipe", frozenset(["mjpeg"])),
    b"R": _Kind("webp_pipe", frozenset(["webp"])),
}
_STILL_FORMATS = {kind.formats for kind in _STILLS.values()}
WHOLE_IMAGE = {"err_detect": "explode"}  # else FFmpeg makes up what is missing of a JPEG image that was cut short
_FIXED_LIBAVFORMAT = (62, 12, 100)  # of FFmpeg 8.1
_READ_BYTES = 256 * 1024
_HDR = (ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67)


def read_clip(
    file: BinaryIO,
    request: FrameRequest,
    limits: DecodingLimits,
    allocate: Allocate,
    *,
    default_num_frames: int,
    part: Part = WHOLE,
) -> Decoded:
    """Choose and decode frames of an open file; pixels [T, H, W, 3] go into memory got from `allocate`.

    `allocate` is called again, after the first memory is released, for a video that must be decoded from its start.

    A part decodes its share of the frames, which may be none, to their places in that memory.

    Raises InvalidRequest, VideoUnsupported, VideoUnreadable or VideoTooLarge, whatever the file holds.
    """
    head = check_file(file, limits, is_still=request.is_still)
    kind = _STILLS[head[:1]] if request.is_still else _VIDEO
    with translated():
        with opened(file, limits, kind) as container:
            stream = _video_stream(container, limits, kind)
            codec, size = stream.codec_context.codec.canonical_name, (stream.width, stream.height)
            if request.is_still and 0 in size:  # of an image over the limit, FFmpeg does not even tell the size
                fact = f"has more than {limits.max_pixels:,} pixels (VIDSPEC_MAX_PIXELS)"
                raise VideoUnreadable(f"The image is damaged, or {fact}.", param="video")
            warnings = _describe(container, stream)
            timeline = _scan(container, stream, limits, warnings)
        times_s, duration_s = timeline.timestamps_s(), timeline.duration_s
        selection = select_frames(times_s, duration_s, request, limits, default_num_frames=default_num_frames)
        limits.check_decoded_bytes(len(selection.indices), *fitted_size(*size, limits.max_frame_pixels))

        def decoded(timeline: Timeline) -> tuple[tuple[int, ...], FrameConverter]:
            share = timeline.shares(selection.indices, part.count)[part.number]
            picker = FramePicker[VideoFrame](selection.indices[place] for place in share)
            only_size = None if part == WHOLE else size
            converter = FrameConverter(len(selection.indices), limits, allocate, share, only_size)
            with opened(file, limits, kind) as container:
                stream = _video_stream(container, limits, kind)
                frames = chosen_frames(_packets_of(container, stream, []), stream.codec_context, timeline, picker)
                indices = tuple(converter.convert(index, frame) for index, frame in frames)
            converter.finish(picker.num_lost, picker.num_replaced)
            return indices, converter

        found = None
        with suppress(NoEntryPoint):
            found = decoded(timeline)
        if found is None and part != WHOLE:  # then the pool has the whole clip decoded
            raise VideoUnreadable("The video cannot be decoded in parts.", param="video")
        indices, converter = found or decoded(replace(timeline, keyframes=()))
        width, height = converter.upright_size
    return Decoded(
        timestamps_s=tuple(times_s[i] for i in indices),
        source_indices=indices,
        source_fps=len(times_s) / duration_s,
        source_num_frames=len(times_s),
        duration_s=duration_s,
        width=width,
        height=height,
        codec=codec,
        warnings=(*warnings, *selection.warnings, *converter.warnings),
        is_sound=converter.is_sound,
        orientation=converter.orientation,
    )


def check_file(file: BinaryIO, limits: DecodingLimits, *, is_still: bool) -> bytes:
    """Check the file's size and signature, and return its first bytes; raises a VideoError."""
    num_bytes = file.seek(0, os.SEEK_END)  # no stat: the sandbox refuses it
    file.seek(0)
    if num_bytes == 0:
        raise VideoUnreadable("The video is empty.", param="video")
    if num_bytes > limits.max_bytes:
        fact = f"The file has {num_bytes:,} bytes"
        raise over_limit(fact, f"{limits.max_bytes:,}", "VIDSPEC_MAX_UPLOAD_BYTES")
    head = file.read(HEAD_BYTES)
    check_signature(head, is_still=is_still)
    return head


@contextmanager
def translated() -> Iterator[None]:
    """Translates FFmpeg's errors in the block to ours."""
    try:
        yield
    except MemoryError:  # first: PyAV's MemoryError is an FFmpegError too
        raise VideoTooLarge("Decoding needs more memory than one video may use.", param="video") from None
    except av.FFmpegError:
        raise VideoUnreadable("The video is damaged: it cannot be decoded.", param="video") from None


def _scan(container: InputContainer, stream: VideoStream, limits: DecodingLimits, warnings: list[str]) -> Timeline:
    """Walk every packet: the file's true timeline, whatever its header claims."""
    packets: list[PacketFacts] = []
    for packet in _packets_of(container, stream, warnings):
        if len(packets) == limits.max_source_frames:
            fact = f"The video has more than {len(packets):,} frames"
            raise over_limit(fact, f"{limits.max_source_frames:,}", "VIDSPEC_MAX_SOURCE_FRAMES")
        packets.append(PacketFacts(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, packet.is_discard))
    time_base = stream.time_base
    trust_pts = container.format.name not in _UNORDERED
    timeline = time_base and build_timeline(packets, time_base, stream.average_rate, trust_pts=trust_pts)
    if container.format.name in _TIMELESS:
        warnings.append(
            f"The file has no timestamps; {float(stream.average_rate or 25):g} frames per second are assumed."
        )
    if not time_base or not timeline:
        raise VideoUnreadable("The video has no frames to show.", param="video")
    if timeline.duration_s > limits.max_duration_s:
        fact = f"The video lasts {timeline.duration_s:.1f} s"
        raise over_limit(fact, f"{limits.max_duration_s:g} s", "VIDSPEC_MAX_DURATION_S")
    pause_s = max(float(timeline.ticks[0] * timeline.seconds_per_tick), 0.0)  # before the first frame: may be counted
    stated_s = float((stream.duration or 0) * time_base) - pause_s
    if container.format.name not in _RESTARTING and stated_s > 1.05 * timeline.duration_s + 0.5:
        warnings.append(f"The file ends early: it has {timeline.duration_s:.1f} of {stated_s:.1f} s.")
    return timeline


def is_ffmpeg_fixed() -> bool:
    """Whether FFmpeg is 8.1 or newer: before, crafted files wrote out of bounds (CVE-2026-40962, CVE-2025-9951)."""
    return bool(av.library_versions["libavformat"] >= _FIXED_LIBAVFORMAT)


@contextmanager
def opened(file: BinaryIO, limits: DecodingLimits, kind: _Kind = _VIDEO) -> Iterator[InputContainer]:
    """The container in `file`, from its start; closed on leaving."""
    # As container options these also reach the decoders that FFmpeg opens on its own while probing.
    options = {
        "format_whitelist": kind.formats,
        "protocol_whitelist": "none",  # all bytes come from `file`; no other file or address may be opened
        "codec_whitelist": kind.decoders,
        "max_streams": str(_MAX_TRACKS + 1),
        "max_pixels": limits.max_padded_pixels,
        "threads": "1",
    }
    file.seek(0)
    try:
        container = av.open(
            file,
            mode="r",
            format=None if kind is _VIDEO else kind.formats,
            options=options,
            metadata_errors="replace",
            buffer_size=_READ_BYTES,
        )
    except MemoryError:  # FFmpeg's answer to too many streams, and to absurd sizes
        raise VideoUnsupported(
            f"The file has more than {_MAX_TRACKS} tracks, or a damaged header.", param="video"
        ) from None
    except av.FFmpegError:
        raise VideoUnreadable("The file cannot be opened: it is damaged or incomplete.", param="video") from None
    try:
        # FFmpeg leaves out tracks over its limit, and some formats then no longer know where their packets are.
        if len(container.streams) > _MAX_TRACKS:
            raise VideoUnsupported(f"The file has more than {_MAX_TRACKS} tracks.", param="video")
        yield container
    finally:
        container.close()  # at once: reference cycles would keep it for long


def _video_stream(container: InputContainer, limits: DecodingLimits, kind: _Kind = _VIDEO) -> VideoStream:
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
    limits.check_pixels(codec.width, codec.height)
    codec.options = {"max_pixels": limits.max_padded_pixels, "codec_whitelist": kind.decoders}
    if kind is not _VIDEO:
        codec.options |= WHOLE_IMAGE
    codec.thread_type = ThreadType.NONE
    codec.thread_count = 1
    for other in container.streams:
        if other is not stream:
            other.discard = Discard.all
    return stream


def _describe(container: InputContainer, stream: VideoStream) -> list[str]:
    """Warnings that a person should know before trusting an answer about the file."""
    warnings = []
    if container.streams.audio:
        warnings.append("Audio is ignored.")
    if len(container.streams.video) > 1:
        warnings.append(
            f"The file has several video tracks; the one with {stream.width}x{stream.height} pixels is used."
        )
    if stream.sample_aspect_ratio and stream.sample_aspect_ratio != 1:
        warnings.append(f"Pixels are not square ({stream.sample_aspect_ratio}); frames are used as stored.")
    if stream.codec_context.color_trc in _HDR:
        warnings.append("HDR colours are converted without tone mapping.")
    return warnings


def _packets_of(container: InputContainer, stream: VideoStream, warnings: list[str]) -> Iterator[Packet[VideoStream]]:
    """The stream's packets up to the end or the first damage in the container; the same on every walk."""
    packets = container.demux(stream)
    try:
        if container.format.name in _RESTARTING:
            packets = _on_one_clock(packets, stream)
        elif container.format.name in _APPENDED:
            packets = _one_after_the_other(packets)
        for packet in packets:
            if packet.size:  # an empty one would tell the decoder that the stream is over
                yield packet
                if container.format.name in _STILL_FORMATS:  # phones put previews and brightness maps after the image
                    return
    except MemoryError:
        raise
    except IndexError:  # from PyAV, after the last packet, if a track appeared on the way
        return
    except av.FFmpegError:
        warnings.append("The file is damaged; nothing after the damage is used.")


def _on_one_clock(packets: Iterable[Packet[VideoStream]], stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Shifts the times after each restart of the clock: the next frame shows when the last one before has been shown.

    FFmpeg takes a clock that goes back by a minute for one that has run over, and lets it jump ahead by a day.
    """
    shift, end, step = 0, 0, 1
    before: int | None = None
    for packet in packets:
        if packet.dts is not None and stream.time_base is not None:
            start = packet.dts if packet.pts is None else packet.pts
            gap = 0 if before is None else packet.dts - before
            before = packet.dts
            if -_MOST_BACK_S <= gap * stream.time_base <= _MOST_AHEAD_S:
                step = max(gap, 1)
            else:
                shift = end - start
            packet.dts += shift
            end = max(end, start + shift + (packet.duration or step))
        if packet.pts is not None:
            packet.pts += shift
        yield packet


def _one_after_the_other(packets: Iterable[Packet[VideoStream]]) -> Iterator[Packet[VideoStream]]:
    """Shifts the times from each keyframe that comes before the last one: there, another file was appended."""
    shift = end = latest = 0
    for packet in packets:
        if packet.pts is not None:
            if packet.is_keyframe and packet.pts < latest:
                shift = end - packet.pts
            if packet.is_keyframe:
                latest = packet.pts
            packet.pts += shift
            end = max(end, packet.pts + (packet.duration or 1))
        yield packet
