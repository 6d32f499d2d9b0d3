"""The true caption of a scene, and the way back from a caption to the facts it states.

Every sentence has two or three phrasings. Which one is used depends on an attribute of what it describes
(probability 0.8, else chance): greedy text is then varied and still learnable; pure chance would be neither.
"""

from __future__ import annotations

import re

import numpy as np

from .attributes import (
    BACKGROUND_NAMES,
    COLOUR_NAMES,
    CORNERS,
    DIRECTIONS,
    LETTERS,
    NUMBERS,
    REGIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    TIMINGS,
    WINDOWS,
)
from .scene import Scene, Sign, Thing

_ATTRIBUTE_PHRASING_SHARE = 0.8
Facts = dict[str, object]

_TIMING_PHRASES = (
    dict(zip(TIMINGS, ("the whole time", "after appearing halfway", "before vanishing halfway"), strict=True)),
    dict(zip(TIMINGS, ("always visible", "visible from halfway on", "visible until halfway"), strict=True)),
    dict(zip(TIMINGS, ("present throughout", "entering midway", "leaving midway"), strict=True)),
)


def caption(scene: Scene, *, by_attribute_share: float = _ATTRIBUTE_PHRASING_SHARE) -> str:
    """The caption of a scene; same scene, same text. At share 1 no phrasing is left to chance."""
    rng = np.random.default_rng([scene.seed, 11])

    def phrasing(attribute: int, count: int) -> int:
        by_attribute = rng.random() < by_attribute_share
        chance = int(rng.integers(count))
        return attribute % count if by_attribute else chance

    background = phrasing(BACKGROUND_NAMES.index(scene.background), 2)
    sentences = [
        (
            f"The background is {scene.texture} {scene.background}.",
            f"Everything happens on a {scene.texture} {scene.background} background.",
        )[background],
        _count_sentence(len(scene.things), phrasing(TEXTURES.index(scene.texture), 2)),
    ]
    sentences += [_thing_sentence(thing, phrasing(SHAPES.index(thing.shape), 3)) for thing in scene.things]
    sentences += [_sign_sentence(sign, phrasing(LETTERS.index(sign.letter), 2)) for sign in scene.signs]
    if not scene.signs:
        sentences.append("No letter appears.")
    return " ".join(sentences)


def _count_sentence(count: int, phrasing: int) -> str:
    noun = "object" if count == 1 else "objects"
    start = f"There {'is' if count == 1 else 'are'}" if phrasing == 0 else "We see"
    return f"{start} {NUMBERS[count]} {noun}."


def _thing_sentence(thing: Thing, phrasing: int) -> str:
    start, end = REGIONS[thing.start], REGIONS[thing.end]
    rests = thing.direction == "nowhere"
    timing = _TIMING_PHRASES[phrasing][thing.timing]
    last = thing.new_colour or thing.colour  # stated always: a word to look up is learned, whether to go on is not
    if phrasing == 0:
        motion = f"stays still at the {start}" if rests else f"moves {thing.direction} from the {start} to the {end}"
        return f"A {thing.size} {thing.colour} {thing.shape} {motion} {timing} and ends {last}."
    if phrasing == 1:
        motion = f"rests at the {start}" if rests else f"travels {thing.direction} from the {start} to the {end}"
        return (
            f"There is a {thing.size} {thing.shape} in {thing.colour}, {timing}, that {motion} and is {last} at last."
        )
    motion = "never moves" if rests else f"heads {thing.direction} and ends at the {end}"
    what = f"{thing.colour} {thing.shape} of {thing.size} size"
    return f"The {start} holds a {what} that {motion}, {timing}, and ends {last}."


def _sign_sentence(sign: Sign, phrasing: int) -> str:
    corner, window = CORNERS[sign.corner], WINDOWS[sign.window]
    if phrasing == 0:
        return f"The letter {sign.letter} shows at the {corner} near the {window}."
    return f"A sign {sign.letter} flashes near the {window} at the {corner}."


def scene_facts(scene: Scene) -> Facts:
    """What a perfect caption states, in the same form as `parse_caption`."""
    return {
        "background": scene.background,
        "texture": scene.texture,
        "count": len(scene.things),
        "things": tuple(
            {
                "size": thing.size,
                "colour": thing.colour,
                "shape": thing.shape,
                "start": REGIONS[thing.start],
                "end": REGIONS[thing.end],
                "direction": thing.direction,
                "timing": thing.timing,
                "new_colour": thing.new_colour,
            }
            for thing in scene.things
        ),
        "signs": tuple((sign.letter, CORNERS[sign.corner], WINDOWS[sign.window]) for sign in scene.signs),
    }


def _any(name: str, words: tuple[str, ...]) -> str:
    return f"(?P<{name}>{'|'.join(sorted(map(re.escape, words), key=len, reverse=True))})"


def _thing_patterns() -> tuple[re.Pattern[str], ...]:
    kind = {"size": _any("size", SIZES), "colour": _any("colour", COLOUR_NAMES), "shape": _any("shape", SHAPES)}
    start, end, way = _any("start", REGIONS), _any("end", REGIONS), _any("direction", DIRECTIONS)
    rest = _any("rest", REGIONS)
    last = _any("last_colour", COLOUR_NAMES)
    timing = [_any("timing", tuple(phrases.values())) for phrases in _TIMING_PHRASES]
    return (
        re.compile(
            f"A {kind['size']} {kind['colour']} {kind['shape']} "
            f"(?:stays still at the {rest}|moves {way} from the {start} to the {end}) {timing[0]} and ends {last}"
        ),
        re.compile(
            f"There is a {kind['size']} {kind['shape']} in {kind['colour']}, {timing[1]}, "
            f"that (?:rests at the {rest}|travels {way} from the {start} to the {end}) and is {last} at last"
        ),
        re.compile(
            f"The {start} holds a {kind['colour']} {kind['shape']} of {kind['size']} size that "
            f"(?:never moves|heads {way} and ends at the {end}), {timing[2]}, and ends {last}"
        ),
    )


_THINGS = _thing_patterns()
_BACKGROUND = re.compile(
    f"(?:The background is|Everything happens on a) {_any('texture', TEXTURES)} "
    f"{_any('background', BACKGROUND_NAMES)}(?: background)?"
)
_COUNT = re.compile(rf"(?:There (?:is|are)|We see) {_any('count', NUMBERS)} objects?")
_SIGNS = (
    re.compile(
        f"The letter {_any('letter', LETTERS)} shows at the {_any('corner', CORNERS)} "
        f"near the {_any('window', WINDOWS)}"
    ),
    re.compile(
        f"A sign {_any('letter', LETTERS)} flashes near the {_any('window', WINDOWS)} at the {_any('corner', CORNERS)}"
    ),
)


def parse_caption(text: str) -> Facts | None:
    """The facts a caption states; None where a sentence is none of ours (then it is not all right)."""
    background: str | None = None
    texture: str | None = None
    count: int | None = None
    things: list[dict[str, str | None]] = []
    signs: list[tuple[str, str, str]] = []
    for sentence in filter(None, (part.strip() for part in text.strip().split("."))):
        if match := _BACKGROUND.fullmatch(sentence):
            background, texture = match["background"], match["texture"]
        elif match := _COUNT.fullmatch(sentence):
            count = NUMBERS.index(match["count"])
        elif thing := _parse_thing(sentence):
            things.append(thing)
        elif match := next(filter(None, (p.fullmatch(sentence) for p in _SIGNS)), None):
            signs.append((match["letter"], match["corner"], match["window"]))
        elif sentence != "No letter appears":
            return None
    return {
        "background": background,
        "texture": texture,
        "count": count,
        "things": tuple(things),
        "signs": tuple(signs),
    }


def _parse_thing(sentence: str) -> dict[str, str | None] | None:
    for phrases, pattern in zip(_TIMING_PHRASES, _THINGS, strict=True):
        if match := pattern.fullmatch(sentence):
            found = match.groupdict()
            start = found["start"] or found.get("rest")
            return {
                "size": found["size"],
                "colour": found["colour"],
                "shape": found["shape"],
                "start": start,
                "end": found["end"] or start,
                "direction": found["direction"] or "nowhere",
                "timing": next(name for name, phrase in phrases.items() if phrase == found["timing"]),
                "new_colour": found["last_colour"] if found["last_colour"] != found["colour"] else None,
            }
    return None
