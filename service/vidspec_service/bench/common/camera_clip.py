"""The clips that a bench decodes: files, and one like a camera's: what compresses to nothing decodes in no time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidspec_service.bench.common.options import amount, existing_file, option
from vidspec_service.bench.common.report import Tell
from vidspec_service.decoding.writer import write_clip

_WIDTH, _HEIGHT, _FPS = 1280, 720, 30
_ENCODING = {"preset": "veryfast", "crf": "23"}  # B-frames and references as any encoder's; x264's own GOP of 250


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """By default a minute of 720p."""

    clips: tuple[Path, ...] = option((), "--clip", "these, too", type=existing_file, nargs="+", metavar="FILE")
    rendered_s: float = option(
        60.0,
        "--seconds",
        "length of the 720p clip that is rendered; 0 for none (default %(default)g)",
        type=amount,
        metavar="S",
    )

    def files(self, folder: Path, tell: Tell) -> Iterator[tuple[str, Path]]:
        """What to call each, and where it is; the one that is rendered is written into `folder`."""
        if self.rendered_s > 0:
            tell("rendering a clip", 0, 0)
            path, num_pictures = folder / "rendered.mp4", max(round(self.rendered_s * _FPS), 1)
            write_clip(path, _pictures(num_pictures), _FPS, options=_ENCODING)
            yield f"720p of {self.rendered_s:g} s", path
        yield from ((path.name, path) for path in self.clips)


def _pictures(count: int) -> Iterator[NDArray[np.uint8]]:
    """A camera that moves over a textured scene."""
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
