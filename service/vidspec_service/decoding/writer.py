"""The only writer of video files: RGB frames in, a file out that browsers play from its first byte."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_OPTIONS = {"crf": "12", "preset": "medium"}


def write_clip(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],  # each [H, W, 3] RGB, all of one size; H and W even
    fps: float,
    *,
    options: Mapping[str, str] = DEFAULT_OPTIONS,
) -> None:
    """Encode `frames` to `path`, whose suffix names the container; the same input gives the same bytes.

    Raises ValueError for no frames, frames of unequal or unusable size, or if the encoder refuses, OSError if the disk
    does. `path` is replaced only by a complete file.
    """
    # A GPU machine may lack PyAV, and what is measured there with random models needs no video.
    import av
    from av.codec.context import ThreadType

    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError("a clip needs at least one frame")
    height, width = first.shape[:2]
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        with av.open(partial, mode="w", options={"movflags": "+faststart"}) as container:
            rate = Fraction(fps).limit_denominator(60_000)
            stream: Any = container.add_stream("h264", rate=rate, options=dict(options))
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            # Encoders split their work by the number of threads: with one, every machine gives the same result.
            stream.codec_context.thread_type = ThreadType.NONE
            stream.codec_context.thread_count = 1
            for frame in chain([first], frames):
                if frame.shape != (height, width, 3):
                    raise ValueError(f"a frame has shape {frame.shape}, the first had {height}x{width}x3")
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
        os.replace(partial, path)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise ValueError(error.strerror) from error
    finally:
        partial.unlink(missing_ok=True)
