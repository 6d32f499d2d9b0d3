"""Questions as people put them, about one scene or two; an answer is a word or, for letters, a few.

Where colours change, "the colour" is the first one; a thing is "red" if it ever is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from vidspec_models.bundled.phrasings import phrasings
from vidspec_models.bundled.questions import Question
from vidspec_models.bundled.scene import (
    COLOUR_NAMES,
    LETTERS,
    NUM_SLOTS,
    NUMBERS,
    REGIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    Thing,
)

ABSENT_THINGS = ("dog", "cat", "person", "car", "tree", "house", "bird", "face", "boat", "plane", "star", "ball")
Option = TypeVar("Option")
_FASTER_BY = 1.6  # closer ones are not compared
_Asked = tuple[dict[str, str], str]  # what fills the fields of the phrasing, and the answer
_Ask = Callable[[Scene, np.random.Generator], _Asked | None]


def ask_plainly(scene: Scene, kind: str, rng: np.random.Generator, *, held_out: bool = False) -> Question | None:
    """A question of a kind of PLAIN_KINDS; None where it does not apply to the scene."""
    asked = _ABOUT[kind](scene, rng)
    return None if asked is None else _question(kind, asked, rng, held_out=held_out)


def ask_which_video(
    first: Scene, second: Scene, rng: np.random.Generator, *, held_out: bool = False
) -> Question | None:  # fmt: skip
    """What only one of two clips shows, and in which it is; None if chance found nothing to ask."""
    index = int(rng.integers(2))
    here, there = (first, second) if index == 0 else (second, first)
    what = (
        f"the letter {_any(rng, here.signs).letter}" if here.signs and rng.random() < 0.25 else _some_thing(here, rng)
    )
    if what in _all_that_is_there(there):
        return None
    return _question("which_video", ({"what": what}, ("first", "second")[index]), rng, held_out=held_out)


def _question(kind: str, asked: _Asked, rng: np.random.Generator, *, held_out: bool) -> Question:
    fields, answer = asked
    return Question(kind=kind, text=_any(rng, phrasings(kind, held_out=held_out)).format(**fields), answer=answer)


def _any(rng: np.random.Generator, options: tuple[Option, ...]) -> Option:
    return options[int(rng.integers(len(options)))]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _it(thing: Thing, rng: np.random.Generator) -> str:
    """Its shape is enough; sometimes more is said."""
    return f"the {_any(rng, ('', '', '', f'{thing.colour} ', f'{thing.size} '))}{thing.shape}"


def _colours(thing: Thing) -> tuple[str, ...]:
    return (thing.colour,) if thing.new_colour is None else (thing.colour, thing.new_colour)


def _some_thing(scene: Scene, rng: np.random.Generator) -> str:
    thing = _any(rng, scene.things)
    return _with_article(_any(rng, _names(thing)))


def _names(thing: Thing) -> tuple[str, ...]:
    coloured = tuple(f"{colour} {thing.shape}" for colour in _colours(thing))
    return (thing.shape, f"{thing.size} {thing.shape}", *coloured, *coloured, *(f"{c} object" for c in _colours(thing)))


def _all_that_is_there(scene: Scene) -> set[str]:
    letters = {f"the letter {sign.letter}" for sign in scene.signs}
    return letters | {_with_article(name) for thing in scene.things for name in _names(thing)}


def _presence(scene: Scene, rng: np.random.Generator) -> _Asked | None:
    if rng.random() < 0.5:
        return {"what": _some_thing(scene, rng)}, "yes"
    what = _absent(scene, rng)
    return None if what in _all_that_is_there(scene) else ({"what": what}, "no")


def _absent(scene: Scene, rng: np.random.Generator) -> str:
    """Mostly near misses: a thing of the scene with one word wrong."""
    thing = _any(rng, scene.things)
    colour, shape = _any(rng, COLOUR_NAMES), _any(rng, SHAPES)
    near = (f"{colour} {thing.shape}", f"{thing.colour} {shape}", f"{colour} {shape}", shape, f"{colour} object")
    return _with_article(_any(rng, (*near, *near, _any(rng, ABSENT_THINGS), f"{colour} {_any(rng, ABSENT_THINGS)}")))


def _is_colour(scene: Scene, rng: np.random.Generator) -> _Asked:
    thing = _any(rng, scene.things)
    others = tuple(colour for colour in COLOUR_NAMES if colour not in _colours(thing))
    is_so = rng.random() < 0.5
    it = f"the {thing.shape}"
    return {"it": it, "colour": thing.colour if is_so else _any(rng, others)}, _yes(is_so)


def _is_size(scene: Scene, rng: np.random.Generator) -> _Asked:
    thing, size = _any(rng, scene.things), _any(rng, SIZES)
    return {"it": f"the {thing.shape}", "size": size}, _yes(size == thing.size)


def _has_letter(scene: Scene, rng: np.random.Generator) -> _Asked:
    shown = tuple(sign.letter for sign in scene.signs)
    letter = _any(rng, shown) if shown and rng.random() < 0.5 else _any(rng, LETTERS)
    return {"letter": letter}, _yes(letter in shown)


def _is_textured(scene: Scene, rng: np.random.Generator) -> _Asked:
    texture = scene.texture if rng.random() < 0.3 else _any(rng, TEXTURES)
    return {"texture": texture}, _yes(texture == scene.texture)


def _count_of(scene: Scene, rng: np.random.Generator) -> _Asked:
    thing = _any(rng, scene.things)
    colour = _any(rng, (thing.colour, _any(rng, COLOUR_NAMES)))
    shape = _any(rng, (thing.shape, _any(rng, SHAPES)))
    size = _any(rng, SIZES)
    plural = f"{shape}es" if shape.endswith("s") else f"{shape}s"
    counted: tuple[tuple[str, list[bool]], ...] = (
        (f"{colour} objects", [colour in _colours(one) for one in scene.things]),
        (plural, [one.shape == shape for one in scene.things]),
        (f"{size} objects", [one.size == size for one in scene.things]),
        ("moving objects", [one.start != one.end for one in scene.things]),
        ("still objects", [one.start == one.end for one in scene.things]),
    )
    what, marks = _any(rng, counted)
    return {"what": what}, NUMBERS[sum(marks)]


def _letters(scene: Scene, _: np.random.Generator) -> _Asked:
    return {}, ", ".join(sign.letter for sign in scene.signs) or "none"


def _larger(scene: Scene, rng: np.random.Generator) -> _Asked | None:
    pair = _two(scene, rng)
    if pair is None:
        return None
    one, other = pair
    answer = "same" if one.size == other.size else (one if one.radius > other.radius else other).shape
    return {"one": one.shape, "other": other.shape}, answer


def _faster(scene: Scene, rng: np.random.Generator) -> _Asked | None:
    pair = _two(scene, rng)
    if pair is None:
        return None
    slow, fast = sorted(pair, key=_speed)
    if _speed(fast) < _FASTER_BY * max(_speed(slow), 1.0):
        return None
    return {"one": pair[0].shape, "other": pair[1].shape}, fast.shape


def _two(scene: Scene, rng: np.random.Generator) -> tuple[Thing, Thing] | None:
    if len(scene.things) < 2:
        return None
    one, other = rng.permutation(len(scene.things))[:2]
    return scene.things[one], scene.things[other]


def _speed(thing: Thing) -> float:
    """Pixels a slot, from place to place."""
    way = np.hypot(thing.end_px[0] - thing.start_px[0], thing.end_px[1] - thing.start_px[1])
    return float(way) / ((thing.visible_to - thing.visible_from) * NUM_SLOTS)


def _of_thing(answer: Callable[[Thing], str], *, by_colour: bool = False) -> _Ask:
    """What is said of a thing chosen by chance; it is told from others by its shape, or else by its colour."""

    def ask(scene: Scene, rng: np.random.Generator) -> _Asked:
        thing = _any(rng, scene.things)
        return {"colour": thing.colour} if by_colour else {"it": f"the {thing.shape}"}, answer(thing)

    return ask


def _of_named_thing(answer: Callable[[Thing], str]) -> _Ask:
    """The same, with more said of it at times: what is asked for is neither colour nor size."""

    def ask(scene: Scene, rng: np.random.Generator) -> _Asked:
        thing = _any(rng, scene.things)
        return {"it": _it(thing, rng)}, answer(thing)

    return ask


def _of_scene(answer: Callable[[Scene], str]) -> _Ask:
    return lambda scene, _: ({}, answer(scene))


_ABOUT: dict[str, _Ask] = {
    "colour": _of_thing(lambda thing: thing.colour),
    "last_colour": _of_thing(lambda thing: thing.new_colour or thing.colour),
    "shape": _of_thing(lambda thing: thing.shape, by_colour=True),
    "size": _of_thing(lambda thing: thing.size),
    "start": _of_named_thing(lambda thing: REGIONS[thing.start]),
    "end": _of_named_thing(lambda thing: REGIONS[thing.end]),
    "motion": _of_named_thing(lambda thing: thing.direction),
    "visible": _of_named_thing(lambda thing: thing.timing),
    "count": _of_scene(lambda scene: NUMBERS[len(scene.things)]),
    "count_of": _count_of,
    "letter_count": _of_scene(lambda scene: NUMBERS[len(scene.signs)]),
    "letters": _letters,
    "presence": _presence,
    "moves": _of_named_thing(lambda thing: _yes(thing.start != thing.end)),
    "rests": _of_named_thing(lambda thing: _yes(thing.start == thing.end)),
    "changes": _of_named_thing(lambda thing: _yes(thing.new_colour is not None)),
    "is_size": _is_size,
    "is_colour": _is_colour,
    "has_letter": _has_letter,
    "is_textured": _is_textured,
    "background": _of_scene(lambda scene: scene.background),
    "larger": _larger,
    "faster": _faster,
}
PLAIN_KINDS = tuple(_ABOUT)
