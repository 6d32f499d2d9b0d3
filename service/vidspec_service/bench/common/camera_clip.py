"""A clip like a camera's, rendered: what compresses to nothing would decode in no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidspec_service.decoding.writer import write_clip

_WIDTH, _HEIGHT, _FPS = 1280, 720, 30
_ENCODING = {"preset": "veryfast", "crf": "23"}  # B-frames and references as any encoder's; x264's own GOP of 250


def write_camera_clip(path: Path, seconds: float) -> str:
    """720p at 30 frames a second, of a camera that moves over a textured scene; returns what to call it."""
    write_clip(path, _pictures(max(round(seconds * _FPS), 1)), _FPS, options=_ENCODING)
    return f"rendered {seconds:g} s, {_WIDTH}x{_HEIGHT}, {_FPS} fps"


def _pictures(count: int) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(30, 226, (2 * _HEIGHT // 40, 2 * _WIDTH // 40, 3))
    scene = np.clip(coarse.repeat(40, 0).repeat(40, 1) + rng.integers(-12, 13, (2 * _HEIGHT, 2 * _WIDTH, 1)), 0, 255)
    texture = scene.astype(np.uint8)
    for index in range(count):
        left, top = 3 * index % _WIDTH, 2 * index % _HEIGHT
        picture = texture[top : top + _HEIGHT, left : left + _WIDTH].copy()
        at = 7 * index % (_WIDTH - 160)
        picture[280:440, at : at + 160] = (230, 40, 40)
        yield picture
