"""Reads a clip in this process with the code of a decode child, for tests of its output."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vidspec_models.request import Video
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.reader import read_clip
from vidspec_service.decoding.reader.sequence import read_sequence

EVERY_FRAME = FrameRequest(num_frames=768)
LIMITS = DecodingLimits()


def read(path: Path, request: FrameRequest = EVERY_FRAME, limits: DecodingLimits = LIMITS) -> Clip:
    """`read_clip` or `read_sequence`, with the memory as an array."""
    memory = bytearray()

    def allocate(num_bytes: int) -> memoryview:
        memory.clear()  # fails if a view still exists: a child has no room for two
        memory.extend(bytes(num_bytes))
        return memoryview(memory)

    with open(path, "rb", buffering=0) as file:
        if request.sequence is None:
            decoded = read_clip(file, request, limits, allocate, default_num_frames=8)
        else:
            decoded = read_sequence(file, request, limits, allocate)
    shape = (len(decoded.timestamps_s), decoded.height, decoded.width, 3)
    video = Video(
        frames=np.frombuffer(memory, np.uint8, count=decoded.num_bytes).reshape(shape),
        source_indices=decoded.source_indices,
        source_fps=decoded.source_fps,
        source_num_frames=decoded.source_num_frames,
        duration_s=decoded.duration_s,
    )
    return Clip(video=video, timestamps_s=decoded.timestamps_s, codec=decoded.codec, warnings=decoded.warnings)
