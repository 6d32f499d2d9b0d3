"""The clip that is rendered for `bench decode`: 720p, 30 frames a second, H.264, a keyframe every 250 frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidspec_service.decoding.writer import write_clip

WIDTH, HEIGHT, FPS = 1280, 720, 30
_OPTIONS = {"preset": "veryfast", "crf": "23"}  # B-frames and references as any encoder's; x264's own GOP of 250


def render_clip(path: Path, duration_s: float) -> None:
    """A camera that moves over a textured scene: what compresses to nothing would decode in no time."""
    write_clip(path, _pictures(max(round(duration_s * FPS), 1)), FPS, options=_OPTIONS)


def _pictures(count: int) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(30, 226, (2 * HEIGHT // 40, 2 * WIDTH // 40, 3))
    scene = np.clip(coarse.repeat(40, 0).repeat(40, 1) + rng.integers(-12, 13, (2 * HEIGHT, 2 * WIDTH, 1)), 0, 255)
    texture = scene.astype(np.uint8)
    for number in range(count):
        left, top = 3 * number % WIDTH, 2 * number % HEIGHT
        picture = texture[top : top + HEIGHT, left : left + WIDTH].copy()
        at = 7 * number % (WIDTH - 160)
        picture[280:440, at : at + 160] = (230, 40, 40)
        yield picture
