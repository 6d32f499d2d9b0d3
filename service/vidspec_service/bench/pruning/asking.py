"""The held-out clips and what is asked about each: one caption, and a question of every type that applies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vidspec_models.bundled import SCENE_DURATION_S, TEST_SEEDS, questions, render, sample_scene
from vidspec_service.bench.prompts import CAPTION_PROMPT, scene_video
from vidspec_service.bench.pruning.options import QUESTION_TASKS, Task
from vidspec_service.engine.types import ChatMessage, VideoInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt about one clip."""

    clip: int
    task: Task
    messages: tuple[ChatMessage, ...]
    video: VideoInput


def asked_about(clip: int, tasks: Sequence[Task]) -> Iterator[Asked]:
    """Everything of these tasks about the clip-th test scene, the caption first."""
    seed = TEST_SEEDS[clip]
    video = replace(scene_video(seed), key=f"test-{clip}")
    texts = [(Task.CAPTION, CAPTION_PROMPT)]
    texts += [(QUESTION_TASKS[question.kind], question.text) for question in questions(sample_scene(seed))]
    for task, text in texts:
        if task in tasks:
            messages = (ChatMessage(role="user", text=text, num_videos=1),)
            yield Asked(clip=clip, task=task, messages=messages, video=video)


def long_clip(num_frames: int) -> Asked:
    """The caption of the first test scene, at more frames than the bundled pair was made for: for timing."""
    video = scene_video(TEST_SEEDS[0])
    times = (np.arange(num_frames) + 0.5) / num_frames
    dense = replace(
        video,
        frames=render(sample_scene(TEST_SEEDS[0]), times),
        timestamps_s=tuple(float(time * SCENE_DURATION_S) for time in times),
        source_indices=tuple(int(time * video.source_num_frames) for time in times),
    )
    messages = (ChatMessage(role="user", text=CAPTION_PROMPT, num_videos=1),)
    return Asked(clip=0, task=Task.CAPTION, messages=messages, video=dense)
