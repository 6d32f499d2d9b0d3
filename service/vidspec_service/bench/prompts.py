"""The held-out prompts of a bench: rendered test scenes, whose frames are exactly what the bundled pair is made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vidspec_models.bundled import SCENE_DURATION_S, TEST_SEEDS, questions, render, sample_scene, slot_times
from vidspec_models.synthetic.recipe import prompt_text
from vidspec_service.bench.options import Task
from vidspec_service.engine.types import ChatMessage, VideoInput

CAPTION_PROMPT = "Describe the video."
_SOURCE_FPS = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One question about one clip."""

    index: int
    scene_seed: int
    text: str
    video: VideoInput

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        return (ChatMessage(role="user", text=self.text, num_videos=1),)


def make_prompts(task: Task, indices: range) -> Iterator[BenchPrompt]:
    """Prompt i is about the i-th test scene; questions go round the types that apply to it."""
    for index in indices:
        if task is Task.SYNTHETIC:
            yield BenchPrompt(index=index, scene_seed=index, text=prompt_text(index), video=_blank_video())
            continue
        seed = TEST_SEEDS[index]
        yield BenchPrompt(index=index, scene_seed=seed, text=_text(task, index, seed), video=scene_video(seed))


def _text(task: Task, index: int, seed: int) -> str:
    if task is Task.CAPTION or (task is Task.MIXED and index % 2 == 0):
        return CAPTION_PROMPT
    asked = questions(sample_scene(seed))
    return asked[index % len(asked)].text


def _blank_video() -> VideoInput:
    """What a model without a vision tower does not look at."""
    return VideoInput(
        frames=np.zeros((1, 8, 8, 3), np.uint8),
        timestamps_s=(0.0,),
        source_indices=(0,),
        source_fps=1.0,
        source_num_frames=1,
        duration_s=1.0,
    )


def scene_video(seed: int) -> VideoInput:
    """The canonical frames of a scene, one in the middle of each slot."""
    times = slot_times()
    num_source = int(SCENE_DURATION_S * _SOURCE_FPS)
    return VideoInput(
        frames=render(sample_scene(seed), times),
        timestamps_s=tuple(float(time * SCENE_DURATION_S) for time in times),
        source_indices=tuple(int(time * num_source) for time in times),
        source_fps=_SOURCE_FPS,
        source_num_frames=num_source,
        duration_s=SCENE_DURATION_S,
    )
