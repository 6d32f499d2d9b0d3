"""Counts which facts of the true scene a caption states rightly."""

from __future__ import annotations

from typing import Any

from .captions import parse_caption, scene_facts
from .scene import Scene

_THING_FACTS = ("size", "colour", "shape", "start", "end", "direction", "timing", "new_colour")


class CaptionScore:
    """Running counts over captions; things are matched by shape, which is unique in a clip."""

    def __init__(self) -> None:
        self._clips = 0
        self._all_right = 0
        self._right: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    @property
    def all_right(self) -> float:
        return self._all_right / max(self._clips, 1)

    def add(self, scene: Scene, text: str) -> None:
        truth: dict[str, Any] = scene_facts(scene)
        said: dict[str, Any] | None = parse_caption(text)
        self._clips += 1
        self._all_right += said == truth
        self._count("parses", said is not None)
        if said is None:
            return
        for name in ("background", "texture", "count"):
            self._count(name, said[name] == truth[name])
        self._count("letters", set(said["signs"]) == set(truth["signs"]))
        by_shape = {thing["shape"]: thing for thing in said["things"]}
        for thing in truth["things"]:
            match = by_shape.get(thing["shape"])
            self._count("shape", match is not None)
            for name in _THING_FACTS:
                if match is not None and name != "shape":
                    self._count(name, match[name] == thing[name])

    def _count(self, name: str, is_right: bool) -> None:
        self._asked[name] = self._asked.get(name, 0) + 1
        self._right[name] = self._right.get(name, 0) + is_right

    def fact_rates(self) -> dict[str, float]:
        return {name: self._right[name] / count for name, count in self._asked.items()}
