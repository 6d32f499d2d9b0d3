"""Clips: rendered scenes with known content, as frames or files; and files like a camera's, to test decoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidspec_models.bundled.render import render
from vidspec_models.bundled.scene import NUM_SLOTS, SCENE_DURATION_S, TEST_SEEDS, Scene, sample_scene
from vidspec_models.request import VIDEO, GenerationRequest, Turn, Video
from vidspec_service.arguments import existing_file, non_negative_float
from vidspec_service.bench.common.options import number, option
from vidspec_service.bench.common.report import OnProgress, as_text
from vidspec_service.decoding.writer import write_clip

CAPTION_PROMPT = "Describe the video."
_SOURCE_FPS = 16
_WIDTH, _HEIGHT, _FPS = 1280, 720, 30
_ENCODING = {"preset": "veryfast", "crf": "23"}  # the usual B-frames and reference frames; x264's default GOP of 250


def scene_video(seed: int, num_frames: int = NUM_SLOTS, key: str | None = None) -> Video:
    """A scene's whole clip as `num_frames` evenly spaced frames; by default those that the bundled pair is made for."""
    times = _times(num_frames)
    num_source = max(int(SCENE_DURATION_S * _SOURCE_FPS), num_frames)
    return Video(
        frames=render(sample_scene(seed), times),
        source_indices=tuple(int(time * num_source) for time in times),
        source_fps=num_source / SCENE_DURATION_S,
        source_num_frames=num_source,
        duration_s=SCENE_DURATION_S,
        key=key,
    )


def write_scene(seed: int, output: Path, size: int = 256) -> Scene:
    """Write the clip of a seed, 4 s at 16 frames per second, and return its scene. Raises OSError and ValueError.

    `size`: pixels a side; by default twice the models' input, so that chroma subsampling does not blur what they see.
    """
    scene = sample_scene(seed)
    write_clip(output, render(scene, _times(int(SCENE_DURATION_S * _SOURCE_FPS)), size), _SOURCE_FPS)
    return scene


def _times(num_frames: int) -> NDArray[np.float64]:
    """The midpoints of `num_frames` equal parts of a scene, whose time goes from 0 to 1."""
    return (np.arange(num_frames) + 0.5) / num_frames


def scene_request(
    request_id: str, clip: int, max_tokens: int, text: str = CAPTION_PROMPT, key: str | None = None
) -> GenerationRequest:
    """A request about the test clip of this number, answered greedily."""
    videos = (scene_video(TEST_SEEDS[clip], key=key),)
    return GenerationRequest(request_id=request_id, turns=about_video(text), videos=videos, max_tokens=max_tokens)


def about_video(text: str) -> tuple[Turn, ...]:
    """One question about one video."""
    return (Turn(role="user", parts=(VIDEO, text)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """Which clips to use; by default a minute of 720p."""

    clips: tuple[Path, ...] = option(
        (), "--clip", "also use these files", type=existing_file, nargs="+", metavar="FILE"
    )
    rendered_s: float = number(
        60.0, "--seconds", "length of the 720p clip that is rendered; 0 for none", "S", type=non_negative_float
    )

    def files(self, folder: Path, on_progress: OnProgress) -> Iterator[tuple[str, Path]]:
        """The name and path of each clip; the rendered clip is written into `folder`."""
        if self.rendered_s > 0:
            on_progress("rendering a clip", 0, 0)
            path, num_pictures = folder / "rendered.mp4", max(round(self.rendered_s * _FPS), 1)
            write_clip(path, _pictures(num_pictures), _FPS, options=_ENCODING)
            yield f"720p of {self.rendered_s:g} s", path
        yield from ((as_text(path.name), path) for path in self.clips)


def _pictures(count: int) -> Iterator[NDArray[np.uint8]]:
    """Pictures from a camera that moves over a textured scene."""
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
