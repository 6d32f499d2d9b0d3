"""Rendered scenes, whose truth is known: as frames, and as the files that `vidspec render-clip` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidspec_models.bundled.render import render
from vidspec_models.bundled.scene import NUM_SLOTS, SCENE_DURATION_S, Scene, sample_scene
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_service.decoding.writer import write_clip

CAPTION_PROMPT = "Describe the video."
_SOURCE_FPS = 16


def scene_video(seed: int, num_frames: int = NUM_SLOTS, key: str | None = None) -> Video:
    """A scene's whole clip at so many frames, evenly spaced; by default exactly those the bundled pair is made for."""
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
    """Write the clip of a seed, 4 s at 16 frames per second, and say what is in it. Raises OSError and ValueError.

    `size`: pixels a side; by default twice the models' own: chroma subsampling must not blur what they look at.
    """
    scene = sample_scene(seed)
    write_clip(output, render(scene, _times(int(SCENE_DURATION_S * _SOURCE_FPS)), size), _SOURCE_FPS)
    return scene


def _times(num_frames: int) -> NDArray[np.float64]:
    """The middles of so many equal parts of a scene, whose time goes from 0 to 1."""
    return (np.arange(num_frames) + 0.5) / num_frames


def about_video(text: str) -> tuple[Turn, ...]:
    """One question about one video."""
    return (Turn(role="user", parts=(VIDEO, text)),)
