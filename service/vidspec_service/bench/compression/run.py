"""The run of `bench compression`: one child process after another, each with one configuration and the same clips.

This module scores the answers against the rendered scene: a caption's facts, and the answer word of a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vidspec_models.bundled.captions import caption_marks
from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.scene import TEST_SEEDS, Scene, sample_scene
from vidspec_models.loading.spec import ModelSpec
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.environment import Placement
from vidspec_service.bench.common.loops import until_interrupted
from vidspec_service.bench.common.report import OnProgress, Row
from vidspec_service.bench.compression.options import CompressionConfig, CompressionOptions, Method
from vidspec_service.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Score:
    """The number of right answers, out of those asked."""

    right: int = 0
    asked: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.right + other.right, self.asked + other.asked)

    @property
    def rate(self) -> float:
        """0 where nothing was asked."""
        return self.right / self.asked if self.asked else 0.0


def score_caption(scene: Scene, text: str) -> Score:
    """Score every fact of the scene: one that the caption leaves out, or states in unknown words, is wrong."""
    marks = caption_marks(scene, text)
    return Score(sum(is_right is True for _, is_right in marks), len(marks))


def score_answers(truths: Sequence[str], texts: Sequence[str]) -> Score:
    """Score answers to questions: only the exact words of the true answer are right."""
    return Score(sum(text.strip() == truth for truth, text in zip(truths, texts, strict=True)), len(truths))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigResult:
    """Results of one configuration; clips are in the same order in all fields."""

    config: CompressionConfig
    captions: Sequence[Row]  # of `CompressedTarget.describe`, each with its `score`
    questions: Sequence[Score]

    def scores(self) -> list[Score]:
        """Per clip, questions and caption facts together."""
        return [caption["score"] + asked for caption, asked in zip(self.captions, self.questions, strict=True)]


def measure_compression(
    options: CompressionOptions, spec: ModelSpec, threads: int, on_progress: OnProgress
) -> tuple[list[ConfigResult], Placement]:
    """All measurements, and where the model ran. Raises ConfigError with a child's error message."""
    from vidspec_service.bench.compression.target import CompressedTarget  # torch

    configs = options.configs()
    scenes = {seed: sample_scene(seed) for seed in TEST_SEEDS[: options.num_clips]}
    total = 2 * len(scenes) * len(configs)
    found, placement, done = [], None, 0
    for config in until_interrupted(configs):
        name, frames = f"{config.label}, {config.frames} frames", config.frames
        captions, scores = list[Row](), list[Score]()
        with Child(CompressedTarget, spec, threads, config, options.max_tokens) as child:
            placement = child.call(CompressedTarget.placement)
            if Method.EARLYTOM in options.methods and not child.call(CompressedTarget.can_merge_frames):
                raise ConfigError(
                    "earlytom merges frames in the vision tower; this model's tower cannot: name other --methods"
                )
            for seed, scene in scenes.items():
                on_progress(f"{name}: captions", done + len(captions), total)
                caption = child.call(CompressedTarget.describe, seed, frames)
                captions.append({"score": score_caption(scene, caption.pop("text")), **caption})
            done += len(captions)
            for seed, scene in scenes.items():  # after all captions, as questions need more memory
                on_progress(f"{name}: questions", done + len(scores), total)
                asked = questions(scene)
                texts = child.call(CompressedTarget.question, seed, frames, [each.text for each in asked])
                scores.append(score_answers([each.answer for each in asked], texts))
            done += len(scores)
        found.append(ConfigResult(config=config, captions=captions, questions=scores))
    assert placement is not None, "options without a configuration"
    return found, placement
