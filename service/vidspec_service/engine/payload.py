"""Payload: a request's conversation and frames in anonymous shared memory, handed over as one file descriptor.

Anonymous (memfd) memory has no name: it vanishes with its last holder, however that process ends.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
from dataclasses import dataclass

import msgspec
import numpy as np

from vidspec_service.engine.types import ChatMessage, GenerationRequest, VideoInput

_PREFIX_BYTES = 8  # length of the header that follows


@dataclass(frozen=True, slots=True, kw_only=True)
class _VideoHeader:
    shape: tuple[int, int, int, int]
    timestamps_s: tuple[float, ...]
    source_indices: tuple[int, ...]
    source_fps: float
    source_num_frames: int
    duration_s: float
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    messages: tuple[ChatMessage, ...]
    videos: tuple[_VideoHeader, ...]


def write_payload(messages: tuple[ChatMessage, ...], videos: tuple[VideoInput, ...]) -> int:
    """Copy everything into a new memfd; the caller owns (and closes) the returned descriptor."""
    headers = tuple(
        _VideoHeader(
            shape=video.frames.shape,
            timestamps_s=video.timestamps_s,
            source_indices=video.source_indices,
            source_fps=video.source_fps,
            source_num_frames=video.source_num_frames,
            duration_s=video.duration_s,
            key=video.key,
        )
        for video in videos
    )
    header = msgspec.msgpack.encode(_Header(messages=messages, videos=headers))
    fd = os.memfd_create("vidspec-payload", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(len(header).to_bytes(_PREFIX_BYTES, "little"))
        file.write(header)
        for video in videos:
            file.write(np.ascontiguousarray(video.frames).data)
    return fd


async def payload_of(request: GenerationRequest) -> int:
    """Write it off the event loop: it is a copy of megabytes. Cancelled or not, no descriptor is lost."""
    writing = asyncio.ensure_future(asyncio.to_thread(write_payload, request.messages, request.videos))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(lambda done: None if done.cancelled() else os.close(done.result()))
        raise


def read_payload(fd: int) -> tuple[tuple[ChatMessage, ...], tuple[VideoInput, ...]]:
    """Map a payload; frames are views that keep the mapping alive. Closes `fd`."""
    with os.fdopen(fd, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(memory[:_PREFIX_BYTES], "little")
    offset = _PREFIX_BYTES + length
    header = msgspec.msgpack.decode(memory[_PREFIX_BYTES:offset], type=_Header)
    videos = []
    for video in header.videos:
        frames = np.frombuffer(memory, np.uint8, math.prod(video.shape), offset).reshape(video.shape)
        offset += frames.nbytes
        videos.append(
            VideoInput(
                frames=frames,
                timestamps_s=video.timestamps_s,
                source_indices=video.source_indices,
                source_fps=video.source_fps,
                source_num_frames=video.source_num_frames,
                duration_s=video.duration_s,
                key=video.key,
            )
        )
    return header.messages, tuple(videos)


def close_payload(fd: int) -> None:
    """Let go of a payload that is not needed after all."""
    os.close(fd)
