"""Short questions with exact answers, by type; the answer is a word of the closed vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vidspec_models.bundled.scene import CORNERS, NUMBERS, REGIONS, WINDOWS, Scene, SceneObject, choose

CAPTION_PROMPTS = (
    "Describe the video.",
    "What happens in the video?",
    "Describe what you see in this clip.",
    "What is happening here?",
)

QUESTION_TYPES = (
    "count", "colour", "shape", "size", "start", "end", "direction", "timing", "change", "first",
    "background", "texture", "letter", "letter_corner", "letter_time", "letter_count",
)  # fmt: skip
_Phrased = tuple[str, str, str]  # two phrasings of a question, the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about one scene; the answer is a word or a few."""

    kind: str
    text: str
    answer: str
    reason: str = ""  # what is seen, if the answer follows from it

    @property
    def reply(self) -> str:
        """The full answer, reason first: a small model looks up one fact per word, and draws no conclusions from facts
        that it has not stated."""
        return f"{self.reason}, so {self.answer}." if self.reason else self.answer


def conclusion(reply: str) -> str:
    """The conclusion after the reason of a reply; the whole reply if it has no reason."""
    _, so, end = reply.rpartition(", so ")
    return end.rstrip(".") if so else reply


def questions(scene: Scene) -> tuple[Question, ...]:
    """One question of each type that applies to the scene, in the order of QUESTION_TYPES."""
    rng = np.random.default_rng([scene.seed, 13])
    asked = [ask(scene, kind, rng) for kind in QUESTION_TYPES]
    return tuple(question for question in asked if question is not None)


def ask(scene: Scene, kind: str, rng: np.random.Generator) -> Question | None:
    """A question of a type, about a thing or letter chosen by `rng`; None if the type does not apply.

    Raises ValueError for an unknown type.
    """
    if kind in ("letter", "letter_corner", "letter_time"):
        phrased = _about_letters(scene, kind, rng)
    elif kind == "first":
        phrased = _about_order(scene, rng)
    elif kind in ("count", "background", "texture", "letter_count"):
        phrased = _about_scene(scene, kind)
    elif kind in QUESTION_TYPES:
        phrased = _about_thing(choose(rng, scene.things), kind)
    else:
        raise ValueError(f"unknown question type {kind!r}")
    if phrased is None:
        return None
    *texts, answer = phrased
    return Question(kind=kind, text=choose(rng, texts), answer=answer)


def _about_scene(scene: Scene, kind: str) -> _Phrased:
    return {
        "count": ("How many objects are there?", "Count the objects.", NUMBERS[len(scene.things)]),
        "background": ("What colour is the background?", "Which background colour is used?", scene.background),
        "texture": ("What texture is the background?", "Which background texture is used?", scene.texture),
        "letter_count": ("How many letters are shown?", "Count the letters.", NUMBERS[len(scene.signs)]),
    }[kind]


def _about_thing(thing: SceneObject, kind: str) -> _Phrased:
    it = f"the {thing.shape}"
    new_colour = thing.new_colour or "unchanged"
    return {
        "colour": (f"What colour is {it} at first?", f"Which colour does {it} start with?", thing.colour),
        "shape": (f"What shape is the {thing.colour} object?", f"Which shape starts {thing.colour}?", thing.shape),
        "size": (f"How big is {it}?", f"What size is {it}?", thing.size),
        "start": (f"Where does {it} start?", f"Where is {it} at first?", REGIONS[thing.start]),
        "end": (f"Where does {it} end?", f"Where is {it} at last?", REGIONS[thing.end]),
        "direction": (f"Which way does {it} move?", f"Where does {it} head?", thing.direction),
        "timing": (f"When is {it} visible?", f"When can we see {it}?", thing.timing),
        "change": (f"Which colour does {it} turn?", f"What colour does {it} become?", new_colour),
    }[kind]


def _about_order(scene: Scene, rng: np.random.Generator) -> _Phrased | None:
    early = [thing for thing in scene.things if thing.visible_from == 0]
    late = [thing for thing in scene.things if thing.visible_from > 0]
    if not early or not late:
        return None
    first = choose(rng, early).shape
    second = choose(rng, late).shape
    a, b = (first, second) if rng.random() < 0.5 else (second, first)
    return f"Which comes first, the {a} or the {b}?", f"Which is seen first, {a} or {b}?", first


def _about_letters(scene: Scene, kind: str, rng: np.random.Generator) -> _Phrased | None:
    if kind == "letter":
        window = int(rng.integers(len(WINDOWS)))
        shown = next((sign.letter for sign in scene.signs if sign.window == window), "none")
        near = f"near the {WINDOWS[window]}?"
        return f"Which letter is shown {near}", f"What letter shows {near}", shown
    if not scene.signs:
        return None
    sign = choose(rng, scene.signs)
    it = f"the letter {sign.letter}"
    if kind == "letter_corner":
        return f"Where is {it} shown?", f"In which corner is {it}?", CORNERS[sign.corner]
    return f"When is {it} shown?", f"When does {it} appear?", WINDOWS[sign.window]
