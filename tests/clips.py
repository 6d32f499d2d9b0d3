"""Writes small video files with PyAV at test time; each frame shows its number as a bar code that any codec keeps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]

_NUM_BITS = 8
_QUIET = {
    "hevc": {"x265-params": "log-level=none:pools=none:frame-threads=1"},
    "av1": {"preset": "12", "svtav1-params": "lp=1"},
    "vp8": {"deadline": "realtime", "cpu-used": "8"},
    "vp9": {"deadline": "realtime", "cpu-used": "8"},
}


def bar_code(number: int, width: int = 64, height: int = 64) -> Picture:
    """A picture [H, W, 3] that shows `number` in eight vertical bars, lowest bit left."""
    bits = [number >> bit & 1 for bit in range(_NUM_BITS)]
    columns = np.minimum(np.arange(width) * _NUM_BITS // width, _NUM_BITS - 1)
    row = np.where(np.array(bits)[columns] == 1, 220, 35).astype(np.uint8)
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def number_of(picture: Picture) -> int:
    """The number that `bar_code` drew into the picture."""
    width = picture.shape[1]
    centres = [(2 * bit + 1) * width // (2 * _NUM_BITS) for bit in range(_NUM_BITS)]
    levels = picture[:, centres].mean(axis=(0, 2))
    return sum(1 << bit for bit, level in enumerate(levels) if level > 128)


def bar_codes(count: int, width: int = 64, height: int = 64) -> list[Picture]:
    return [bar_code(number, width, height) for number in range(count)]


@contextmanager
def scheduled_as_before() -> Iterator[None]:
    """Restore the scheduling policy. SVT-AV1, run as root, leaves its caller at the highest real-time priority: the
    test process and all threads that it starts later would then starve every worker of an engine.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def write_video(
    path: Path,
    pictures: Iterable[Picture],
    *,
    codec: str = "h264",
    rate: int = 30,
    pix_fmt: str = "yuv420p",
    gop: int = 12,
    options: Mapping[str, str] | None = None,
    pts: Sequence[int] | None = None,  # in ticks of `time_base`, which must then be given
    time_base: Fraction | None = None,
    muxing: Mapping[str, str] | None = None,
    rotation: float | None = None,  # degrees that a player turns the picture counterclockwise
    hflip: bool = False,
    aspect: Fraction | None = None,
    with_audio: bool = False,
) -> Path:
    """Encode `pictures`; the suffix of `path` names the container. Returns `path`."""
    with scheduled_as_before(), av.open(path, "w", options=dict(muxing or {})) as container:
        stream: Any = container.add_stream(codec, rate=rate, options={**_QUIET.get(codec, {}), **(options or {})})
        if rotation is not None:
            stream.set_display_rotation(rotation, hflip=hflip)
        audio: Any = container.add_stream("aac", rate=16_000, layout="mono") if with_audio else None
        stream.pix_fmt = pix_fmt
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for index, picture in enumerate(pictures):
            if index == 0:
                stream.height, stream.width = picture.shape[:2]
                if time_base is not None:
                    stream.codec_context.time_base = time_base
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if pts is not None and time_base is not None:
                frame.pts, frame.time_base = pts[index], time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio is not None:
            _write_silence(container, audio)
    return path


def write_film(path: Path, pictures: Iterable[Picture], *, num_sounds: int) -> Path:
    """A video with `num_sounds` audio tracks, each as long as the video."""
    with av.open(path, "w") as container:
        stream: Any = container.add_stream("h264", rate=25)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        sounds: list[Any] = [container.add_stream("aac", rate=16_000, layout="mono") for _ in range(num_sounds)]
        for index, picture in enumerate(pictures):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            for sound in sounds:
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 640), np.float32), format="fltp", layout="mono")
                frame.sample_rate, frame.pts = 16_000, 640 * index
                container.mux(sound.encode(frame))
        for track in (stream, *sounds):
            container.mux(track.encode())
    return path


def write_sound(path: Path) -> Path:
    """A file with one audio track and no video."""
    with av.open(path, "w") as container:
        _write_silence(container, container.add_stream("aac", rate=16_000, layout="mono"))
    return path


def decode_all(path: Path, track: int = 0) -> dict[int, Picture]:
    """Every frame that FFmpeg shows, by PTS, decoded in one plain pass: the reference for readers."""
    with av.open(path) as container:
        stream = container.streams.video[track]
        stream.codec_context.thread_type = "NONE"
        shown: dict[int, Picture] = {}
        for frame in container.decode(stream):
            assert frame.pts is not None
            shown[frame.pts] = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    return dict(sorted(shown.items()))


def _write_silence(container: Any, stream: Any) -> None:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
    frame.sample_rate = 16_000
    container.mux(stream.encode(frame))
    container.mux(stream.encode())
