"""What of an answer is true: a caption's facts and a question's word, against the scene that was rendered. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vidspec_models.bundled import Scene, parse_caption
from vidspec_models.bundled.captions import scene_facts


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
    """Every fact of the scene counts: one that the caption leaves out or does not put into known words is wrong.

    Things are matched by their shape, which is unique in a scene.
    """
    truth: dict[str, Any] = scene_facts(scene)
    said: dict[str, Any] = parse_caption(text) or {"things": (), "signs": ()}
    right = [said.get(name) == truth[name] for name in ("background", "texture", "count")]
    right.append(set(said["signs"]) == set(truth["signs"]))
    by_shape = {thing["shape"]: thing for thing in said["things"]}
    for thing in truth["things"]:
        found = by_shape.get(thing["shape"], {})
        right += [found.get(name) == value if found else False for name, value in thing.items()]
    return Score(sum(right), len(right))


def score_answer(truth: str, text: str) -> Score:
    """The word itself, and nothing else."""
    return Score(int(text.strip() == truth), 1)
