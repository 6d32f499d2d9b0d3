"""The held-out clips of the benches: rendered test scenes, whose truth is known."""

from __future__ import annotations

import numpy as np

from vidspec_models.bundled.render import render
from vidspec_models.bundled.scene import NUM_SLOTS, SCENE_DURATION_S, sample_scene
from vidspec_models.request import Turn, Video

CAPTION_PROMPT = "Describe the video."
_SOURCE_FPS = 16.0


def scene_video(seed: int, num_frames: int = NUM_SLOTS, key: str | None = None) -> Video:
    """A scene's whole clip at so many frames, evenly spaced; by default exactly those the bundled pair is made for."""
    times = (np.arange(num_frames) + 0.5) / num_frames
    num_source = max(int(SCENE_DURATION_S * _SOURCE_FPS), num_frames)
    return Video(
        frames=render(sample_scene(seed), times),
        source_indices=tuple(int(time * num_source) for time in times),
        source_fps=num_source / SCENE_DURATION_S,
        source_num_frames=num_source,
        duration_s=SCENE_DURATION_S,
        key=key,
    )


def about_video(text: str) -> tuple[Turn, ...]:
    """One question about one video."""
    return (Turn(role="user", text=text, num_videos=1),)
