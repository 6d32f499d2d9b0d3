"""Writes the true caption of a scene, and parses a caption back into the facts that it states.

Every sentence has two or three phrasings. Which one is used depends on an attribute of what it describes
(probability 0.8, else random): greedy text is then varied and still learnable; random phrasings alone would be neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from vidspec_models.bundled.scene import CORNERS, NUMBERS, REGIONS, TIMINGS, WINDOWS, WORDS, Scene, SceneObject

_ATTRIBUTE_PHRASING_SHARE = 0.8
Facts = dict[str, Any]

_BACKGROUND = (
    "The background is {texture} {background}",
    "Everything happens on a {texture} {background} background",
)
_COUNT = ("There {verb} {count} {noun}", "We see {count} {noun}")
# Each phrasing for a thing that rests, and for one that moves. The last colour is always stated: the model learns to
# look up a word, but not to decide whether the sentence goes on.
_THING = (
    (
        "A {size} {colour} {shape} stays still at the {start} {timing} and ends {last}",
        "A {size} {colour} {shape} moves {direction} from the {start} to the {end} {timing} and ends {last}",
    ),
    (
        "There is a {size} {shape} in {colour}, {timing}, that rests at the {start} and is {last} at last",
        "There is a {size} {shape} in {colour}, {timing}, that travels {direction} from the {start} to the {end} "
        "and is {last} at last",
    ),
    (
        "The {start} holds a {colour} {shape} of {size} size that never moves, {timing}, and ends {last}",
        "The {start} holds a {colour} {shape} of {size} size that heads {direction} and ends at the {end}, {timing}, "
        "and ends {last}",
    ),
)
_TIMING = (  # words for TIMINGS in each phrasing of _THING
    ("the whole time", "after appearing halfway", "before vanishing halfway"),
    ("always visible", "visible from halfway on", "visible until halfway"),
    ("present throughout", "entering midway", "leaving midway"),
)
_SIGN = (
    "The letter {letter} shows at the {corner} near the {window}",
    "A sign {letter} flashes near the {window} at the {corner}",
)
NO_SIGN = "No letter appears"


def caption(scene: Scene, *, by_attribute_share: float = _ATTRIBUTE_PHRASING_SHARE) -> str:
    """The caption of a scene; the same scene gives the same text. With a share of 1, no phrasing is random."""
    rng = np.random.default_rng([scene.seed, 11])

    def phrasing(name: str, word: str, count: int) -> int:
        by_attribute = rng.random() < by_attribute_share
        chance = int(rng.integers(count))
        return WORDS[name].index(word) % count if by_attribute else chance

    facts = scene_facts(scene)
    verb, noun = ("is", "object") if len(scene.things) == 1 else ("are", "objects")
    sentences = [
        _BACKGROUND[phrasing("background", scene.background, 2)].format(**facts),
        _COUNT[phrasing("texture", scene.texture, 2)].format(verb=verb, count=NUMBERS[len(scene.things)], noun=noun),
    ]
    sentences += [_thing_sentence(thing, phrasing("shape", thing.shape, 3)) for thing in scene.things]
    for letter, corner, window in facts["signs"]:
        sentences.append(_SIGN[phrasing("letter", letter, 2)].format(letter=letter, corner=corner, window=window))
    return " ".join(f"{sentence}." for sentence in sentences + ([] if scene.signs else [NO_SIGN]))


def _thing_sentence(thing: SceneObject, phrasing: int) -> str:
    facts = _thing_facts(thing)
    timing = _TIMING[phrasing][TIMINGS.index(thing.timing)]
    last = thing.new_colour or thing.colour
    return _THING[phrasing][thing.direction != "nowhere"].format(**facts | {"timing": timing, "last": last})


def scene_facts(scene: Scene) -> Facts:
    """What a perfect caption states, in the same form as `parse_caption`."""
    return {
        "background": scene.background,
        "texture": scene.texture,
        "count": len(scene.things),
        "things": tuple(_thing_facts(thing) for thing in scene.things),
        "signs": tuple((sign.letter, CORNERS[sign.corner], WINDOWS[sign.window]) for sign in scene.signs),
    }


def caption_marks(scene: Scene, text: str) -> list[tuple[str, bool | None]]:
    """Every fact of the scene by name, and whether the caption states it correctly; None if it does not state it."""
    return fact_marks(scene, parse_caption(text))


def fact_marks(scene: Scene, said: Facts | None) -> list[tuple[str, bool | None]]:
    """As `caption_marks`, for facts stated in any form. If `said` is None, the text could not be parsed: all are None.

    Things are matched by their shape, which is unique in a scene.
    """
    truth = scene_facts(scene)
    stated: Facts = said or {"things": (), "signs": ()}
    marks: list[tuple[str, bool | None]] = [
        (name, stated.get(name) == truth[name]) for name in ("background", "texture", "count")
    ]
    marks.append(("letters", set(stated["signs"]) == set(truth["signs"])))
    by_shape = {thing["shape"]: thing for thing in stated["things"]}
    for thing in truth["things"]:
        found = by_shape.get(thing["shape"])
        marks.append(("shape", found is not None))
        others = [name for name in thing if name != "shape"]
        marks += [(name, None if found is None else found[name] == thing[name]) for name in others]
    return marks if said is not None else [(name, None) for name, _ in marks]


def _thing_facts(thing: SceneObject) -> dict[str, str | None]:
    return {
        "size": thing.size,
        "colour": thing.colour,
        "shape": thing.shape,
        "start": REGIONS[thing.start],
        "end": REGIONS[thing.end],
        "direction": thing.direction,
        "timing": thing.timing,
        "new_colour": thing.new_colour,
    }


def parse_caption(text: str) -> Facts | None:
    """The facts that a caption states; None if it has an unknown sentence (then the caption counts as wrong)."""
    facts: Facts = {"background": None, "texture": None, "count": None, "things": (), "signs": ()}
    for sentence in filter(None, (part.strip() for part in text.strip().split("."))):
        readings = ((kind, match.groupdict()) for kind, pattern in _PATTERNS if (match := pattern.fullmatch(sentence)))
        kind, found = next(readings, (None, {}))
        if kind == "background":
            facts |= found
        elif kind == "count":
            facts["count"] = NUMBERS.index(found["count"])
        elif kind == "thing":
            facts["things"] += (_stated(found),)
        elif kind == "sign":
            facts["signs"] += ((found["letter"], found["corner"], found["window"]),)
        elif sentence != NO_SIGN:
            return None
    return facts


def _patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """The kind and regular expression of every phrasing; a field matches only the words that it is written with."""
    regions, colours = WORDS["region"], WORDS["colour"]
    words = {**WORDS, "verb": ("is", "are"), "noun": ("object", "objects")}
    words |= {"start": regions, "end": regions, "corner": CORNERS, "last": colours}
    kinds = [("background", _BACKGROUND, words), ("count", _COUNT, words), ("sign", _SIGN, words)]
    kinds += [("thing", _THING[number], {**words, "timing": _TIMING[number]}) for number in range(len(_THING))]
    for kind, phrasings, known in kinds:
        groups = {
            name: f"(?P<{name}>{'|'.join(sorted(map(re.escape, known[name]), key=len, reverse=True))})"
            for name in known
        }
        yield from ((kind, re.compile(phrasing.format(**groups))) for phrasing in phrasings)


_PATTERNS = tuple(_patterns())


def _stated(found: dict[str, str]) -> dict[str, str | None]:
    timing = next(phrases.index(found["timing"]) for phrases in _TIMING if found["timing"] in phrases)
    return {name: found[name] for name in ("size", "colour", "shape", "start")} | {
        "end": found.get("end", found["start"]),
        "direction": found.get("direction", "nowhere"),
        "timing": TIMINGS[timing],
        "new_colour": found["last"] if found["last"] != found["colour"] else None,
    }
