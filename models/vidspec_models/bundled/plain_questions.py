"""Everyday questions about one scene or two; an answer that follows from several facts comes after these as its reason.

If a colour changes, "the colour" is the first one, and a thing is "red" if it is red at any time. A question about a
missing thing gets the answer that there is none, or UNKNOWN if no clip can show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from vidspec_models.bundled.phrasings import UNKNOWN, phrasings
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
    WINDOWS,
    Scene,
    SceneObject,
    choose,
)

ABSENT_THINGS = ("dog", "cat", "person", "car", "tree", "house", "bird", "face", "boat", "plane", "star", "ball")
_ABOUT_ONE_THING = ("colour", "last_colour", "size", "start", "end", "motion", "visible", "moves", "rests", "changes")
_SHAPE_SHARE = 0.85  # share of shapes among missing things that are asked about; the others are ABSENT_THINGS
_MIXED_SHARE = 0.35  # share of absent things that mix two of the scene: asked rarely, half of these got a "yes"
_FASTER_BY = 1.6  # things are compared only if their speeds differ at least by this factor


@dataclass(frozen=True, slots=True)
class _Asked:
    fields: dict[str, str]  # values for the fields of the phrasing
    answer: str
    reason: str = ""
    phrased_as: str = ""  # another kind, whose phrasings are used


_Ask = Callable[[Scene, np.random.Generator], _Asked | None]


def ask_plainly(scene: Scene, kind: str, rng: np.random.Generator, *, held_out: bool = False) -> Question | None:
    """A question of a kind of PLAIN_KINDS; None where it does not apply to the scene."""
    asked = _ABOUT[kind](scene, rng)
    return None if asked is None else _question(kind, asked, rng, held_out=held_out)


def ask_which_video(
    first: Scene, second: Scene, rng: np.random.Generator, *, held_out: bool = False
) -> Question | None:  # fmt: skip
    """Asks which of two clips shows something that the other does not; None if the random draw found no question."""
    index = int(rng.integers(2))
    here, there = (first, second) if index == 0 else (second, first)
    what = (
        f"the letter {choose(rng, here.signs).letter}" if here.signs and rng.random() < 0.25 else _some_thing(here, rng)
    )
    if what in _all_that_is_there(there):
        return None
    return _question("which_video", _Asked({"what": what}, ("first", "second")[index]), rng, held_out=held_out)


def _question(kind: str, asked: _Asked, rng: np.random.Generator, *, held_out: bool) -> Question:
    text = choose(rng, phrasings(asked.phrased_as or kind, held_out=held_out)).format(**asked.fields)
    return Question(kind=kind, text=text, answer=asked.answer, reason=asked.reason)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _it(thing: SceneObject, rng: np.random.Generator) -> str:
    """Names a thing by its shape, which is unique; sometimes adds its colour or size."""
    return f"the {choose(rng, ('', '', '', f'{thing.colour} ', f'{thing.size} '))}{thing.shape}"


def _colours(thing: SceneObject) -> tuple[str, ...]:
    return (thing.colour,) if thing.new_colour is None else (thing.colour, thing.new_colour)


def _some_thing(scene: Scene, rng: np.random.Generator) -> str:
    thing = choose(rng, scene.things)
    return _with_article(choose(rng, _names(thing)))


def _names(thing: SceneObject) -> tuple[str, ...]:
    coloured = tuple(f"{colour} {thing.shape}" for colour in _colours(thing))
    return (thing.shape, f"{thing.size} {thing.shape}", *coloured, *coloured, *(f"{c} object" for c in _colours(thing)))


def _all_that_is_there(scene: Scene) -> set[str]:
    letters = {f"the letter {sign.letter}" for sign in scene.signs}
    return letters | {_with_article(name) for thing in scene.things for name in _names(thing)}


def _of_every_thing(scene: Scene, said: Callable[[SceneObject], str]) -> str:
    """A clause about each thing, in the order of captions."""
    return ", ".join(f"the {thing.shape} {said(thing)}" for thing in scene.things)


def _by_colour(thing: SceneObject) -> str:
    """First and last colour; the last one is always stated, as in captions."""
    return f"is {thing.colour} and ends {thing.new_colour or thing.colour}"


def _by_size(thing: SceneObject) -> str:
    return f"is {thing.size}"


def _by_motion(thing: SceneObject) -> str:
    return f"moves {thing.direction}"


def _at_last(thing: SceneObject) -> str:
    return "unchanged" if thing.new_colour is None else f"{thing.new_colour} at last"


def _by_window(scene: Scene) -> str:
    """Which letter shows in each window."""
    shown = {sign.window: sign.letter for sign in scene.signs}
    return ", ".join(f"{shown.get(number, 'none')} near the {window}" for number, window in enumerate(WINDOWS))


def _presence(scene: Scene, rng: np.random.Generator) -> _Asked | None:
    is_there = rng.random() < 0.5
    what = _some_thing(scene, rng) if is_there else _absent(scene, rng)
    if not is_there and what in _all_that_is_there(scene):
        return None
    seen = _by_size if any(size in what for size in SIZES) else _by_colour
    return _Asked({"what": what}, _yes(is_there), f"Is there {what}? Seen: {_of_every_thing(scene, seen)}")


def _absent(scene: Scene, rng: np.random.Generator) -> str:
    """Asks mostly for near misses: a thing with one word wrong, or one with the colour of another."""
    thing = choose(rng, scene.things)
    others = tuple(one for one in scene.things if one is not thing)
    if others and rng.random() < _MIXED_SHARE:
        return _with_article(f"{choose(rng, _colours(thing))} {choose(rng, others).shape}")
    colour, shape = choose(rng, COLOUR_NAMES), choose(rng, SHAPES)
    sized = f"{choose(rng, SIZES)} {choose(rng, (thing.shape, shape))}"
    near = (f"{colour} {thing.shape}", f"{thing.colour} {shape}", f"{colour} {shape}", shape, f"{colour} object", sized)
    return _with_article(
        choose(rng, (*near, *near, choose(rng, ABSENT_THINGS), f"{colour} {choose(rng, ABSENT_THINGS)}"))
    )


def _missing(scene: Scene, rng: np.random.Generator) -> _Asked:
    """Asks about a thing that is not in the scene, or that no clip can show."""
    more = choose(rng, ("", "", f"{choose(rng, COLOUR_NAMES)} ", f"{choose(rng, SIZES)} "))
    shown = {thing.shape for thing in scene.things}
    what, answer = choose(rng, ABSENT_THINGS), UNKNOWN
    if rng.random() < _SHAPE_SHARE:
        what = choose(rng, tuple(shape for shape in SHAPES if shape not in shown))
        answer = f"There is no {what}."
    return _Asked({"it": f"the {more}{what}"}, answer, phrased_as=choose(rng, _ABOUT_ONE_THING))


def _is_colour(scene: Scene, rng: np.random.Generator) -> _Asked:
    thing = choose(rng, scene.things)
    others = tuple(colour for colour in COLOUR_NAMES if colour not in _colours(thing))
    is_so = rng.random() < 0.5
    fields = {"it": f"the {thing.shape}", "colour": thing.colour if is_so else choose(rng, others)}
    return _Asked(fields, _yes(is_so), f"Is it {fields['colour']}? It is {thing.colour}")


def _is_size(scene: Scene, rng: np.random.Generator) -> _Asked:
    thing, size = choose(rng, scene.things), choose(rng, SIZES)
    return _Asked(
        {"it": f"the {thing.shape}", "size": size}, _yes(size == thing.size), f"Is it {size}? It is {thing.size}"
    )


def _has_letter(scene: Scene, rng: np.random.Generator) -> _Asked:
    shown = tuple(sign.letter for sign in scene.signs)
    # Copying the asked letter is hard when others are shown, so only 40 % are drawn from those shown.
    letter = choose(rng, shown) if shown and rng.random() < 0.4 else choose(rng, LETTERS)
    return _Asked({"letter": letter}, _yes(letter in shown), f"Is there {letter}? Seen: {_by_window(scene)}")


def _is_textured(scene: Scene, rng: np.random.Generator) -> _Asked:
    texture = scene.texture if rng.random() < 0.3 else choose(rng, TEXTURES)
    return _Asked({"texture": texture}, _yes(texture == scene.texture), f"Is it {texture}? It is {scene.texture}")


def _count_of(scene: Scene, rng: np.random.Generator) -> _Asked:
    thing = choose(rng, scene.things)
    colour = choose(rng, (thing.colour, choose(rng, COLOUR_NAMES)))
    shape = choose(rng, (thing.shape, choose(rng, SHAPES)))
    size = choose(rng, SIZES)
    plural = f"{shape}es" if shape.endswith("s") else f"{shape}s"
    counted: tuple[tuple[str, Callable[[SceneObject], str], list[bool]], ...] = (
        (f"{colour} objects", _by_colour, [colour in _colours(one) for one in scene.things]),
        (plural, _by_colour, [one.shape == shape for one in scene.things]),
        (f"{size} objects", _by_size, [one.size == size for one in scene.things]),
        ("moving objects", _by_motion, [one.start != one.end for one in scene.things]),
        ("still objects", _by_motion, [one.start == one.end for one in scene.things]),
    )
    what, seen, marks = choose(rng, counted)
    return _Asked({"what": what}, NUMBERS[sum(marks)], f"How many {what}? Seen: {_of_every_thing(scene, seen)}")


def _letters(scene: Scene, _: np.random.Generator) -> _Asked:
    return _Asked({}, ", ".join(sign.letter for sign in scene.signs) or "none", f"Seen: {_by_window(scene)}")


def _larger(scene: Scene, rng: np.random.Generator) -> _Asked | None:
    if len(scene.things) < 2:
        return None
    one, other = _two(scene, rng)
    answer = "the same" if one.size == other.size else f"the {(one if one.radius > other.radius else other).shape}"
    reason = f"The {one.shape} is {one.size}, the {other.shape} is {other.size}"
    return _Asked({"one": one.shape, "other": other.shape}, answer, reason)


def _faster(scene: Scene, rng: np.random.Generator) -> _Asked | None:
    if len(scene.things) < 2:
        return None
    one, other = _two(scene, rng)
    slow, fast = sorted((one, other), key=_speed)
    if _speed(fast) < _FASTER_BY * max(_speed(slow), 1.0):
        return None
    return _Asked({"one": one.shape, "other": other.shape}, fast.shape)


def _two(scene: Scene, rng: np.random.Generator) -> tuple[SceneObject, SceneObject]:
    one, other = rng.permutation(len(scene.things))[:2]
    return scene.things[one], scene.things[other]


def _speed(thing: SceneObject) -> float:
    """Pixels per slot, on the straight line from start to end."""
    way = np.hypot(thing.end_px[0] - thing.start_px[0], thing.end_px[1] - thing.start_px[1])
    return float(way) / ((thing.visible_to - thing.visible_from) * NUM_SLOTS)


def _of_thing(answer: Callable[[SceneObject], str], *, by_colour: bool = False) -> _Ask:
    """Asks about a random thing, which is identified by its shape or, with `by_colour`, by its colour."""

    def ask(scene: Scene, rng: np.random.Generator) -> _Asked:
        thing = choose(rng, scene.things)
        return _Asked({"colour": thing.colour} if by_colour else {"it": f"the {thing.shape}"}, answer(thing))

    return ask


def _of_named_thing(answer: Callable[[SceneObject], str], reason: Callable[[SceneObject], str] = lambda _: "") -> _Ask:
    """As `_of_thing`, but sometimes also names colour or size; for questions that ask for neither."""

    def ask(scene: Scene, rng: np.random.Generator) -> _Asked:
        thing = choose(rng, scene.things)
        return _Asked({"it": _it(thing, rng)}, answer(thing), reason(thing))

    return ask


def _of_scene(answer: Callable[[Scene], str], reason: Callable[[Scene], str] = lambda _: "") -> _Ask:
    return lambda scene, _: _Asked({}, answer(scene), reason(scene))


_ABOUT: dict[str, _Ask] = {
    "colour": _of_thing(lambda thing: thing.colour),
    "last_colour": _of_thing(lambda thing: thing.new_colour or thing.colour),
    "shape": _of_thing(lambda thing: thing.shape, by_colour=True),
    "size": _of_thing(lambda thing: thing.size),
    "start": _of_named_thing(lambda thing: REGIONS[thing.start]),
    "end": _of_named_thing(lambda thing: REGIONS[thing.end]),
    "motion": _of_named_thing(attrgetter("direction")),
    "visible": _of_named_thing(lambda thing: thing.timing),
    "count": _of_scene(lambda scene: NUMBERS[len(scene.things)]),
    "count_of": _count_of,
    "letter_count": _of_scene(lambda scene: NUMBERS[len(scene.signs)], lambda scene: f"Seen: {_by_window(scene)}"),
    "letters": _letters,
    "presence": _presence,
    "moves": _of_named_thing(lambda thing: _yes(thing.start != thing.end), attrgetter("direction")),
    "rests": _of_named_thing(lambda thing: _yes(thing.start == thing.end), attrgetter("direction")),
    "changes": _of_named_thing(lambda thing: _yes(thing.new_colour is not None), _at_last),
    "is_size": _is_size,
    "is_colour": _is_colour,
    "has_letter": _has_letter,
    "missing": _missing,
    "is_textured": _is_textured,
    "background": _of_scene(lambda scene: scene.background),
    "larger": _larger,
    "faster": _faster,
}
PLAIN_KINDS = tuple(_ABOUT)
