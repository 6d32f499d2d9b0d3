"""Options of `bench pruning`, and its prompts about a clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.request import Preservation, Video
from vidspec_service.arguments import non_negative_int
from vidspec_service.bench.common.options import choices, number, option
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, scene_video
from vidspec_service.errors import ConfigError

BASELINE = Preservation.NONE
FIXED = {Preservation.NONE: 0.0, Preservation.BLIND: 1.0}  # the only ratio of strategies that ignore the ratio


class PruningTask(StrEnum):
    """What is asked about a clip; question types that need similar visual information form one task."""

    CAPTION = "caption"
    APPEARANCE = "appearance"
    MOTION = "motion"
    TIME = "time"
    LETTERS = "letters"
    COUNT = "count"


QUESTION_TASKS = {
    kind: task
    for task, kinds in {
        PruningTask.APPEARANCE: ("colour", "shape", "size", "background", "texture"),
        PruningTask.MOTION: ("start", "end", "direction"),
        PruningTask.TIME: ("timing", "change", "first"),
        PruningTask.LETTERS: ("letter", "letter_corner", "letter_time"),
        PruningTask.COUNT: ("letter_count", "count"),
    }.items()
    for kind in kinds
}


@dataclass(frozen=True, slots=True)
class PruningConfig:
    """A strategy at a ratio. Those that ignore the ratio are measured once: `none` at 0, `blind` at 1."""

    strategy: Preservation
    ratio: float

    @property
    def prune_ratio(self) -> float:
        """The ratio as strategies and the engine accept it."""
        return min(self.ratio, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningOptions:
    """What to measure; by default everything."""

    num_clips: int = number(24, "--clips", "number of test clips")
    strategies: tuple[Preservation, ...] = choices(Preservation, "--strategies", "strategies to compare (default all)")
    ratios: tuple[float, ...] = option(
        (0.0, 0.5, 0.75, 0.9, 0.95),
        "--ratios",
        "prune ratios (default 0 0.5 0.75 0.9 0.95)",
        nargs="+",
        type=float,
        metavar="R",
    )
    tasks: tuple[PruningTask, ...] = choices(PruningTask, "--tasks", "what to ask (default all)")
    max_tokens: int = number(160, "--max-tokens", "maximum tokens per answer")
    long_frames: int = number(64, "--long-frames", "frames of the clip that is timed")
    use_engine: bool = option(False, "--engine", "measure tokens/s of captions in the engine", action="store_true")
    seed: int = number(0, "--seed", "seed of the strategy random", type=non_negative_int)

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0 <= ratio <= 0.99:
                raise ConfigError(f"--ratios must be from 0 to 0.99, not {ratio:g}")
        if self.use_engine and PruningTask.CAPTION not in self.tasks:
            raise ConfigError("--engine measures captions, but --tasks does not include them")

    def ratios_of(self, strategy: Preservation) -> list[float]:
        return [FIXED[strategy]] if strategy in FIXED else sorted(self.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPrompt:
    """One prompt about one clip."""

    clip: int
    task: PruningTask
    text: str
    video: Video


def clip_prompts(clip: int, tasks: Sequence[PruningTask]) -> Iterator[ClipPrompt]:
    """All prompts of these tasks about test scene number `clip`, the caption first."""
    seed = TEST_SEEDS[clip]
    video = scene_video(seed, key=f"test-{clip}")
    texts = [(PruningTask.CAPTION, CAPTION_PROMPT)]
    texts += [(QUESTION_TASKS[question.kind], question.text) for question in questions(sample_scene(seed))]
    for task, text in texts:
        if task in tasks:
            yield ClipPrompt(clip=clip, task=task, text=text, video=video)
