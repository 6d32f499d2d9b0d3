"""What a run of `bench pruning` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vidspec_service.engine.types import Preservation

RATIOS = (0.0, 0.5, 0.75, 0.9, 0.95)
BASELINE = Preservation.NONE


class Task(StrEnum):
    """What is asked about a clip; question types that need the same kind of sight are one task."""

    CAPTION = "caption"
    APPEARANCE = "appearance"
    MOTION = "motion"
    TIME = "time"
    LETTERS = "letters"
    COUNT = "count"


QUESTION_TASKS = {
    "colour": Task.APPEARANCE,
    "shape": Task.APPEARANCE,
    "size": Task.APPEARANCE,
    "background": Task.APPEARANCE,
    "texture": Task.APPEARANCE,
    "start": Task.MOTION,
    "end": Task.MOTION,
    "direction": Task.MOTION,
    "timing": Task.TIME,
    "change": Task.TIME,
    "first": Task.TIME,
    "letter": Task.LETTERS,
    "letter_corner": Task.LETTERS,
    "letter_time": Task.LETTERS,
    "letter_count": Task.COUNT,
    "count": Task.COUNT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningOptions:
    """Defaults are those of the issue's table."""

    num_clips: int = 24
    strategies: tuple[Preservation, ...] = tuple(Preservation)
    ratios: tuple[float, ...] = RATIOS
    tasks: tuple[Task, ...] = tuple(Task)
    max_tokens: int = 160
    long_frames: int = 64  # of the clip on which scoring and prefill are timed
    follow_every: int | None = None  # tokens after which `hippo` chooses anew; None: that experiment is not made
    use_engine: bool = False  # tokens per second from engine runs, not from the speed model
    seed: int = 0  # of `random`
