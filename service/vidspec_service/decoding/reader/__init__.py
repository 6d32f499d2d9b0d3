"""The only reader of video files: an open file in, chosen frames out, upright, in RGB, with exact timestamps.

Runs in a decode child. The file is opened twice: once to scan every packet's timestamp, once to decode. There is no
seeking: walking packets is nearly free, and packet n of the second walk *is* packet n of the first in every container,
while a seek lands differently in each. Packets that no chosen frame needs are not decoded.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import BinaryIO

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from vidspec_service.decoding.clip import WHOLE, Decoded, DecodingLimits, FrameRequest, Shard, over_limit
from vidspec_service.decoding.reader.container import (
    ANIMATED_PNG,
    STILLS,
    VIDEO,
    container_warnings,
    open_container,
    packets_of,
    select_stream,
    stated_duration_s,
    states_display_times,
    translate_errors,
)
from vidspec_service.decoding.reader.frames import (
    FrameConverter,
    LargerFrame,
    NoEntryPoint,
    Write,
    chosen_frames,
    on_white,
)
from vidspec_service.decoding.reader.timeline import PacketFacts, Timeline, build_timeline
from vidspec_service.decoding.selection import FramePicker, select_frames
from vidspec_service.decoding.signatures import HEAD_BYTES, check_signature
from vidspec_service.errors import VideoUnreadable

_TIMELESS = ("h264", "hevc")  # streams without a container
_FIXED_LIBAVFORMAT = (62, 12, 100)  # of FFmpeg 8.1


def read_clip(
    file: BinaryIO,
    request: FrameRequest,
    limits: DecodingLimits,
    write: Write,
    shard: Shard = WHOLE,
) -> Decoded:
    """Choose and decode frames of an open file; `write` gets the pixels [T, H, W, 3], frame by frame.

    A video that must be decoded from its start is written again, and one whose frames grow each time that they do.

    A shard decodes its share of the frames, which may be none, to their places in that memory.

    Raises InvalidRequest, VideoUnsupported, VideoUnreadable or VideoTooLarge, whatever the file holds.
    """
    head = check_file(file, limits, is_still=request.is_still)
    kind = STILLS[head[:1]] if request.is_still else ANIMATED_PNG if head[:1] == b"\x89" else VIDEO
    with translate_errors():
        with open_container(file, limits, kind) as container:
            stream = select_stream(container, limits, kind)
            codec, size = stream.codec_context.codec.canonical_name, (stream.width, stream.height)
            if request.is_still and 0 in size:  # of an image over the limit, FFmpeg does not even tell the size
                fact = f"has more than {limits.max_pixels:,} pixels (VIDSPEC_MAX_PIXELS)"
                raise VideoUnreadable(f"The image is damaged, or {fact}.", param="video")
            warnings = container_warnings(container, stream)
            timeline = _scan(container, stream, limits, warnings)
        times_s, duration_s = timeline.timestamps_s(), timeline.duration_s
        selection = select_frames(times_s, duration_s, request, limits, default_num_frames=limits.default_num_frames)

        def decoded(timeline: Timeline, frame_size: tuple[int, int] | None) -> tuple[tuple[int, ...], FrameConverter]:
            share = timeline.shares(selection.indices, shard.count)[shard.index]
            picker = FramePicker[VideoFrame](selection.indices[place] for place in share)
            converter = FrameConverter(len(selection.indices), limits, write, share, frame_size)
            with open_container(file, limits, kind) as container:
                stream = select_stream(container, limits, kind)
                frames = chosen_frames(packets_of(container, stream, []), stream.codec_context, timeline, picker)
                if kind is not VIDEO:
                    frames = ((index, on_white(frame)) for index, frame in frames)
                indices = tuple(converter.convert(index, frame) for index, frame in frames)
            converter.finish(picker.num_lost, picker.num_replaced)
            return indices, converter

        frame_size = None if shard == WHOLE else size
        while True:
            try:
                indices, converter = decoded(timeline, frame_size)
                break
            except (NoEntryPoint, LargerFrame) as found:
                if shard != WHOLE:  # then the pool has the whole clip decoded
                    raise VideoUnreadable("The video cannot be decoded in shards.", param="video") from None
                if isinstance(found, LargerFrame):
                    frame_size = found.args
                else:
                    timeline = replace(timeline, keyframes=())
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


def _scan(container: InputContainer, stream: VideoStream, limits: DecodingLimits, warnings: list[str]) -> Timeline:
    """Walk every packet: the file's true timeline, whatever its header claims."""
    packets: list[PacketFacts] = []
    for packet in packets_of(container, stream, warnings):
        if len(packets) == limits.max_source_frames:
            fact = f"The video has more than {len(packets):,} frames"
            raise over_limit(fact, f"{limits.max_source_frames:,}", "VIDSPEC_MAX_SOURCE_FRAMES")
        packets.append(PacketFacts(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, packet.is_discard))
    time_base, trust_pts = stream.time_base, states_display_times(container, stream, packets)
    timeline = time_base and build_timeline(packets, time_base, stream.guessed_rate, trust_pts=trust_pts)
    if container.format.name in _TIMELESS:
        warnings.append(
            f"The file has no timestamps; {float(stream.guessed_rate or 25):g} frames per second are assumed."
        )
    if not time_base or not timeline:
        raise VideoUnreadable("The video has no frames to show.", param="video")
    if timeline.duration_s > limits.max_duration_s:
        fact = f"The video lasts {timeline.duration_s:.1f} s"
        raise over_limit(fact, f"{limits.max_duration_s:g} s", "VIDSPEC_MAX_DURATION_S")
    pause_s = max(float(timeline.ticks[0] * timeline.seconds_per_tick), 0.0)  # before the first frame: may be counted
    stated_s = stated_duration_s(container, stream) - pause_s
    if stated_s > 1.05 * timeline.duration_s + 0.5:
        warnings.append(f"The file ends early: it has {timeline.duration_s:.1f} of {stated_s:.1f} s.")
    return timeline


def is_ffmpeg_fixed() -> bool:
    """Whether FFmpeg is 8.1 or newer: before, crafted files wrote out of bounds (CVE-2026-40962, CVE-2025-9951)."""
    return bool(av.library_versions["libavformat"] >= _FIXED_LIBAVFORMAT)
