"""The files that are sent: yours, or rendered scenes; each one different where no cache shall help."""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vidspec_models.bundled import SCENE_DURATION_S, TEST_SEEDS, render, sample_scene
from vidspec_service.decoding.writer import write_clip

_FPS = 16
_EBML = b"\x1aE\xdf\xa3"  # Matroska, WebM
_SIZES = (256, 128, 512)  # pixels a side; the first is `render-clip`'s


def render_clips(count: int, *, is_mixed: bool) -> list[bytes]:
    """MP4 files of four seconds; all of one size, or of several."""
    num_frames = int(SCENE_DURATION_S * _FPS)
    times = np.linspace(0.5 / num_frames, 1 - 0.5 / num_frames, num_frames)
    clips = []
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        for index in range(count):
            size = _SIZES[index % len(_SIZES)] if is_mixed else _SIZES[0]
            path = Path(folder) / f"{index}.mp4"
            write_clip(path, render(sample_scene(TEST_SEEDS[index]), times, size), _FPS)
            clips.append(path.read_bytes())
    return clips


def endless(clips: Sequence[bytes], *, is_repeated: bool) -> Iterator[bytes]:
    """The clips, over and over; unless repeated, each with a number at its end that players skip."""
    for number, clip in enumerate(itertools.cycle(clips)):
        yield clip if is_repeated else clip + _padding(clip, number)


def _padding(clip: bytes, number: int) -> bytes:
    """A void element or a free box; what is neither Matroska nor MP4 has its end marked before."""
    return struct.pack(">BBQ", 0xEC, 0x88, number) if clip[:4] == _EBML else struct.pack(">I4sQ", 16, b"free", number)
