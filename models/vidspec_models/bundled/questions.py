"""Short questions with exact answers, by type; chances are raised for what is hard to learn (motion, time, change)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attributes import CORNERS, LETTERS, NUMBERS, REGIONS, WINDOWS
from .scene import Scene, Thing

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
# How often a type is drawn for training, relative to the others.
TRAINING_WEIGHTS = {"direction": 3.0, "timing": 3.0, "change": 3.0, "end": 2.0, "first": 2.0, "letter": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about one scene; the answer is a single word."""

    kind: str
    text: str
    answer: str


def questions(scene: Scene) -> tuple[Question, ...]:
    """One question of each type that applies to the scene, in the order of QUESTION_TYPES."""
    rng = np.random.default_rng([scene.seed, 13])
    asked = [ask(scene, kind, rng) for kind in QUESTION_TYPES]
    return tuple(question for question in asked if question is not None)


def ask(scene: Scene, kind: str, rng: np.random.Generator) -> Question | None:
    """A question of a type, about a thing or letter chosen by `rng`; None if the type does not apply."""
    if kind in ("letter", "letter_corner", "letter_time", "letter_count"):
        found = _ask_letters(scene, kind, rng)
    elif kind == "first":
        found = _ask_first(scene, rng)
    elif kind in ("count", "background", "texture"):
        found = _ask_scene(scene, kind)
    else:
        found = _ask_thing(scene.things[int(rng.integers(len(scene.things)))], kind)
    if found is None:
        return None
    texts, answer = found
    return Question(kind=kind, text=texts[int(rng.integers(len(texts)))], answer=answer)


_Found = tuple[tuple[str, ...], str]


def _ask_scene(scene: Scene, kind: str) -> _Found:
    if kind == "count":
        return ("How many objects are there?", "Count the objects."), NUMBERS[len(scene.things)]
    if kind == "background":
        return ("What colour is the background?", "Which background colour is used?"), scene.background
    return ("What texture is the background?", "Which background texture is used?"), scene.texture


def _ask_thing(thing: Thing, kind: str) -> _Found:
    name = thing.shape
    if kind == "colour":
        return (f"What colour is the {name} at first?", f"Which colour does the {name} start with?"), thing.colour
    if kind == "shape":
        return (f"What shape is the {thing.colour} object?", f"Which shape starts {thing.colour}?"), thing.shape
    if kind == "size":
        return (f"How big is the {name}?", f"What size is the {name}?"), thing.size
    if kind == "start":
        return (f"Where does the {name} start?", f"Where is the {name} at first?"), REGIONS[thing.start]
    if kind == "end":
        return (f"Where does the {name} end?", f"Where is the {name} at last?"), REGIONS[thing.end]
    if kind == "direction":
        return (f"Which way does the {name} move?", f"Where does the {name} head?"), thing.direction
    if kind == "timing":
        return (f"When is the {name} visible?", f"When can we see the {name}?"), thing.timing
    if kind == "change":
        texts = (f"Which colour does the {name} turn?", f"What colour does the {name} become?")
        return texts, thing.new_colour or "unchanged"
    raise ValueError(f"unknown question type {kind!r}")


def _ask_first(scene: Scene, rng: np.random.Generator) -> _Found | None:
    early = [thing for thing in scene.things if thing.visible_from == 0]
    late = [thing for thing in scene.things if thing.visible_from > 0]
    if not early or not late:
        return None
    one = early[int(rng.integers(len(early)))]
    two = late[int(rng.integers(len(late)))]
    a, b = (one, two) if rng.random() < 0.5 else (two, one)
    texts = (f"Which comes first, the {a.shape} or the {b.shape}?", f"Which is seen first, {a.shape} or {b.shape}?")
    return texts, one.shape


def _ask_letters(scene: Scene, kind: str, rng: np.random.Generator) -> _Found | None:
    if kind == "letter_count":
        return ("How many letters are shown?", "Count the letters."), NUMBERS[len(scene.signs)]
    if kind == "letter":
        window = int(rng.integers(len(WINDOWS)))
        shown = [sign.letter for sign in scene.signs if sign.window == window]
        texts = (f"Which letter is shown near the {WINDOWS[window]}?", f"What letter shows near the {WINDOWS[window]}?")
        return texts, shown[0] if shown else "none"
    if not scene.signs:
        return None
    sign = scene.signs[int(rng.integers(len(scene.signs)))]
    assert sign.letter in LETTERS
    if kind == "letter_corner":
        texts = (f"Where is the letter {sign.letter} shown?", f"In which corner is the letter {sign.letter}?")
        return texts, CORNERS[sign.corner]
    texts = (f"When is the letter {sign.letter} shown?", f"When does the letter {sign.letter} appear?")
    return texts, WINDOWS[sign.window]
