"""The decoders that are compared: each reads numbered frames of a file as RGB, and is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidspec_service.bench.common.report import Row
from vidspec_service.decoding.clip import DecodingLimits, FrameRequest
from vidspec_service.shared_frames import mapped

GRID = 8  # frames are compared by the mean brightness of GRID x GRID squares

Frames = list[NDArray[np.uint8]]  # each [H, W, 3]


class Reader(StrEnum):
    """Our readers and other libraries, which run with their defaults unless the name says otherwise."""

    CHILD = "vidspec"  # only the decoding itself, as the decode child does it
    POOL = "vidspec, spare ready"  # from `DecodePool.decode` to the clip, as a request with a spare child sees it
    ALL_CORES = "vidspec, all cores"  # the same with a child for every core, as a request that is alone sees it
    COLD = "vidspec, cold"  # includes starting the child, as a request without a spare child sees it
    OPENCV = "opencv"  # reads forward to each frame
    OPENCV_SEEK = "opencv, seeking"
    TORCHCODEC = "torchcodec"
    DECORD = "decord"

    @property
    def is_ours(self) -> bool:
        return self in (Reader.CHILD, Reader.POOL, Reader.ALL_CORES, Reader.COLD)


MODULES = {Reader.OPENCV: "cv2", Reader.OPENCV_SEEK: "cv2", Reader.TORCHCODEC: "torchcodec", Reader.DECORD: "decord"}


def is_installed(reader: Reader) -> bool:
    """Whether the reader's module can be found. Loading may still fail, for example without FFmpeg's libraries."""
    return reader.is_ours or find_spec(MODULES[reader]) is not None


def brightness_grid(frame: NDArray[np.uint8]) -> list[float]:
    """GRID x GRID means of the brightness of a frame, which compare frames of any size."""
    height, width = (side - side % GRID for side in frame.shape[:2])
    squares = frame[:height, :width].reshape(GRID, height // GRID, GRID, width // GRID, 3)
    return [round(float(value), 2) for value in squares.mean(axis=(1, 3, 4)).ravel()]


def time_reads(reader: Reader, path: str, repeats: int, indices: Sequence[int]) -> Row:
    """Time repeated reads of the same frames after one warm-up; or an entry `error` if reading fails."""
    os.dup2(2, 1)  # send what libraries print to stderr, because stdout is for results
    try:
        read = _READS[reader]
        frames = read(path, indices)
        wall_s, cpu_s = [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            read(path, indices)
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
    except Exception as error:  # a library that does not load or decode is a row without figures
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    version = "" if reader.is_ours else str(import_module(MODULES[reader]).__version__)
    return {"version": version, "wall_s": wall_s, "cpu_s": cpu_s, "means": [brightness_grid(frame) for frame in frames]}


def _child(path: str, indices: Sequence[int]) -> Frames:
    """Decode as a decode child does. It chooses the frames itself; `indices` came from the same selection."""
    from vidspec_service.decoding.reader import read_clip

    memory = os.memfd_create("frames")
    write = partial(os.pwrite, memory)
    request = FrameRequest(num_frames=len(indices))
    with open(path, "rb", buffering=0) as file:
        decoded = read_clip(file, request, DecodingLimits(), write)
    shape = (len(decoded.timestamps_s), decoded.height, decoded.width, 3)
    frames = list(mapped(memory, shape))
    os.close(memory)
    return frames


def _opencv(path: str, indices: Sequence[int], *, is_seeking: bool = False) -> Frames:
    cv2: Any = import_module("cv2")
    capture, position, frames = cv2.VideoCapture(path), 0, []
    for index in indices:
        if is_seeking:
            capture.set(cv2.CAP_PROP_POS_FRAMES, index)
        else:
            for _ in range(position, index):
                capture.grab()
        is_read, frame = capture.read()
        if not is_read:
            raise ValueError("a frame is missing")
        frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
        position = index + 1
    capture.release()
    return frames


def _torchcodec(path: str, indices: Sequence[int]) -> Frames:
    decoder = import_module("torchcodec.decoders").VideoDecoder(path, dimension_order="NHWC")
    return list(decoder.get_frames_at(list(indices)).data.numpy())


_READS: dict[Reader, Callable[[str, Sequence[int]], Frames]] = {
    Reader.CHILD: _child,
    Reader.OPENCV: _opencv,
    Reader.OPENCV_SEEK: partial(_opencv, is_seeking=True),
    Reader.TORCHCODEC: _torchcodec,
    Reader.DECORD: lambda path, indices: list(import_module("decord").VideoReader(path).get_batch(indices).asnumpy()),
}
