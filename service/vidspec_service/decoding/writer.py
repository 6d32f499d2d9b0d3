"""The only writer of video files: RGB frames in, a file out that browsers play from its first byte."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.codec.context import ThreadType
from av.container import OutputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

DEFAULT_OPTIONS = {"crf": "12", "preset": "medium"}


def write_clip(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],  # each [H, W, 3] RGB, all of one size, even for yuv420p
    fps: float,
    *,
    codec: str = "h264",
    pix_fmt: str = "yuv420p",
    options: Mapping[str, str] = DEFAULT_OPTIONS,
) -> None:
    """Encode `frames` to `path`, whose suffix names the container; the same input gives the same bytes.

    ValueError for no frames, frames of unequal or unusable size, or an encoder's refusal. `path` is replaced
    only by a complete file.
    """
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        with av.open(partial, mode="w", options={"movflags": "+faststart"}) as container:
            _encode(container, frames, codec, Fraction(fps).limit_denominator(60_000), pix_fmt, options)
        os.replace(partial, path)
    except av.FFmpegError as error:
        raise ValueError(f"cannot write {path.name} as {codec} in {pix_fmt}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _encode(
    container: OutputContainer,
    frames: Iterable[NDArray[np.uint8]],
    codec: str,
    rate: Fraction,
    pix_fmt: str,
    options: Mapping[str, str],
) -> None:
    stream: VideoStream | None = None
    for frame in frames:
        if stream is None:
            stream = _add_stream(container, codec, rate, pix_fmt, options, frame)
        if frame.shape != (stream.height, stream.width, 3):
            raise ValueError(f"a frame has shape {frame.shape}, the first had {stream.height}x{stream.width}x3")
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
    if stream is None:
        raise ValueError("a clip needs at least one frame")
    container.mux(stream.encode())


def _add_stream(
    container: OutputContainer,
    codec: str,
    rate: Fraction,
    pix_fmt: str,
    options: Mapping[str, str],
    frame: NDArray[np.uint8],
) -> VideoStream:
    stream: Any = container.add_stream(codec, rate=rate, options=dict(options))
    stream.height, stream.width = frame.shape[:2]
    stream.pix_fmt = pix_fmt
    # Encoders split their work by the number of threads: one, so that the result depends on no machine.
    stream.codec_context.thread_type = ThreadType.NONE
    stream.codec_context.thread_count = 1
    assert isinstance(stream, VideoStream)
    return stream
