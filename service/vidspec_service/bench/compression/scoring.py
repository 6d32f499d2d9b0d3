"""What of an answer is true: a caption's facts and a question's word, against the scene that was rendered. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vidspec_models.bundled.captions import caption_marks
from vidspec_models.bundled.scene import Scene


@dataclass(frozen=True, slots=True)
class Score:
    """So many right of so many asked."""

    right: int = 0
    asked: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.right + other.right, self.asked + other.asked)

    @property
    def rate(self) -> float:
        """0 where nothing was asked."""
        return self.right / self.asked if self.asked else 0.0


def score_caption(scene: Scene, text: str) -> Score:
    """Every fact of the scene counts: one that the caption leaves out or does not put into known words is wrong."""
    marks = caption_marks(scene, text)
    return Score(sum(is_right is True for _, is_right in marks), len(marks))


def score_answer(truth: str, text: str) -> Score:
    """The word itself, and nothing else."""
    return Score(int(text.strip() == truth), 1)
