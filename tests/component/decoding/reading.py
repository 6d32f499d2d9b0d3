"""Reads a clip in this process with the code of a decode child, for tests of its output."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from vidspec_service.decoding.clip import Clip, DecodingLimits, FrameRequest
from vidspec_service.decoding.isolation.process import clip_with
from vidspec_service.decoding.reader import read_clip
from vidspec_service.decoding.reader.sequence import read_sequence

EVERY_FRAME = FrameRequest(num_frames=768)
LIMITS = DecodingLimits()


def read(path: Path, request: FrameRequest = EVERY_FRAME, limits: DecodingLimits = LIMITS) -> Clip:
    """`read_clip` or `read_sequence`, with the memory as an array."""
    with open(path, "rb", buffering=0) as file, TemporaryFile() as memory:
        write = partial(os.pwrite, memory.fileno())
        if request.sequence is None:
            decoded = read_clip(file, request, limits, write)
        else:
            decoded = read_sequence(file, request, limits, write)
        pixels = memory.read(decoded.num_bytes)
    shape = (len(decoded.timestamps_s), decoded.height, decoded.width, 3)
    return clip_with(np.frombuffer(pixels, np.uint8).reshape(shape), decoded)
