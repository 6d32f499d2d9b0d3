"""The only reader of video files: an open file in, chosen frames out, upright, in RGB, with exact timestamps.

Runs in a decode child. FFmpeg's own texts, which may carry paths and addresses, end here.

1. The file is opened twice: once to scan every packet's timestamp, once to decode. Nothing is ever sought:
   walking packets is nearly free, and packet n of the second walk *is* packet n of the first in every
   container, where seeking lands differently in each. Packets that no chosen frame needs are not decoded.
2. Threads are off everywhere: concurrency comes from processes, and FFmpeg's threads have deadlocked servers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from vidspec_service.decoding.canvas import Allocate, check_decoded_bytes, fitted_size
from vidspec_service.decoding.frame_picker import FramePicker
from vidspec_service.decoding.frame_request import FrameRequest
from vidspec_service.decoding.frame_selection import check_request, select_frames
from vidspec_service.decoding.limits import DecodingLimits, over_limit
from vidspec_service.decoding.messages import Decoded
from vidspec_service.decoding.reader.chosen_frames import chosen_frames
from vidspec_service.decoding.reader.opening import (
    STILL,
    VIDEO,
    describe,
    opened,
    packets_of,
    video_stream,
)
from vidspec_service.decoding.reader.painter import Painter
from vidspec_service.decoding.signatures import HEAD_BYTES, check_signature
from vidspec_service.decoding.timeline import PacketFacts, Timeline, build_timeline
from vidspec_service.errors import VideoTooLarge, VideoUnreadable


def read_clip(
    file: BinaryIO,
    request: FrameRequest,
    limits: DecodingLimits,
    allocate: Allocate,
    *,
    default_num_frames: int,
) -> Decoded:
    """Choose and decode frames of an open file; pixels [T, H, W, 3] go into memory got from `allocate`, once.

    Raises InvalidRequest, VideoUnsupported, VideoUnreadable or VideoTooLarge, whatever the file holds.
    """
    _check_file(file, limits, request)
    kind = STILL if request.is_still else VIDEO
    check_request(request, limits)
    with _translated():
        with opened(file, limits, kind) as container:
            stream = video_stream(container, limits, kind)
            codec, size = stream.codec_context.codec.canonical_name, (stream.width, stream.height)
            if request.is_still and 0 in size:  # FFmpeg tells nothing of an image over the limit, not even its size
                fact = f"has more than {limits.max_pixels:,} pixels (VIDSPEC_MAX_PIXELS)"
                raise VideoUnreadable(f"The image is damaged, or {fact}.", param="video")
            warnings = describe(container, stream)
            timeline = _scan(container, stream, limits, warnings)
        times_s, duration_s = timeline.timestamps_s(), timeline.duration_s
        default = 1 if request.is_still else default_num_frames
        selection = select_frames(times_s, duration_s, request, limits, default_num_frames=default)
        check_decoded_bytes(len(selection.indices), *fitted_size(*size, limits.max_frame_pixels), limits)
        picker = FramePicker[VideoFrame](selection.indices)
        painter = Painter(len(selection.indices), limits, allocate)
        with opened(file, limits, kind) as container:
            frames = chosen_frames(container, video_stream(container, limits, kind), timeline, picker)
            indices = tuple(painter.paint(index, frame) for index, frame in frames)
        width, height = painter.finish(picker)
    return Decoded(
        timestamps_s=tuple(times_s[i] for i in indices),
        source_indices=indices,
        source_fps=len(times_s) / duration_s,
        source_num_frames=len(times_s),
        duration_s=duration_s,
        width=width,
        height=height,
        codec=codec,
        warnings=(*warnings, *selection.warnings, *painter.warnings),
    )


def _check_file(file: BinaryIO, limits: DecodingLimits, request: FrameRequest) -> None:
    num_bytes = file.seek(0, os.SEEK_END)  # no stat: the sandbox refuses it
    file.seek(0)
    if num_bytes == 0:
        raise VideoUnreadable("The video is empty.", param="video")
    if num_bytes > limits.max_bytes:
        fact = f"The file has {num_bytes:,} bytes"
        raise over_limit(fact, f"{limits.max_bytes:,}", "VIDSPEC_MAX_UPLOAD_BYTES")
    check_signature(file.read(HEAD_BYTES), is_still=request.is_still)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except MemoryError:  # first: PyAV's own is an FFmpegError too
        raise VideoTooLarge("Decoding needs more memory than one video may use.", param="video") from None
    except av.FFmpegError:
        raise VideoUnreadable("The video is damaged: it cannot be decoded.", param="video") from None


def _scan(container: InputContainer, stream: VideoStream, limits: DecodingLimits, warnings: list[str]) -> Timeline:
    """Walk every packet: the file's true timeline, whatever its header claims."""
    packets: list[PacketFacts] = []
    for packet in packets_of(container, stream, warnings):
        if len(packets) == limits.max_source_frames:
            fact = f"The video has more than {len(packets):,} frames"
            raise over_limit(fact, f"{limits.max_source_frames:,}", "VIDSPEC_MAX_SOURCE_FRAMES")
        packets.append(PacketFacts(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, packet.is_discard))
    time_base = stream.time_base
    # AVI stores no display times: what FFmpeg derives is wrong as soon as frames are reordered.
    trust_pts = container.format.name != "avi"
    timeline = time_base and build_timeline(packets, time_base, stream.average_rate, trust_pts=trust_pts)
    if not timeline:
        raise VideoUnreadable("The video has no frames to show.", param="video")
    if timeline.duration_s > limits.max_duration_s:
        fact = f"The video lasts {timeline.duration_s:.1f} s"
        raise over_limit(fact, f"{limits.max_duration_s:g} s", "VIDSPEC_MAX_DURATION_S")
    stated_s = float((stream.duration or 0) * timeline.seconds_per_tick)
    if stated_s > 1.05 * timeline.duration_s + 0.5:
        warnings.append(f"The file ends early: {timeline.duration_s:.1f} of {stated_s:.1f} s are there.")
    return timeline
