"""What a clip can show, and what happens in it: a closed vocabulary, and frozen scenes sampled from a seed alone.

No pixels and no text: `render` and `captions` make these from a scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Option = TypeVar("Option")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 90, 235),
    "yellow": (240, 222, 50),
    "orange": (250, 140, 20),
    "purple": (150, 60, 200),
    "cyan": (60, 212, 222),
    "pink": (250, 130, 190),
}
COLOUR_NAMES = tuple(COLOURS)
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
SIZES = ("small", "large")
RADIUS_PX = {"small": 8, "large": 13}

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (14, 14, 14),
    "gray": (120, 120, 120),
    "white": (242, 242, 242),
    "brown": (112, 70, 38),
    "navy": (18, 26, 92),
    "teal": (16, 98, 98),
}
BACKGROUND_NAMES = tuple(BACKGROUNDS)
TEXTURES = ("plain", "striped", "dotted")

# Row-major 3x3 grid; hyphenated so that the tokenizer keeps each as one token.
REGIONS = (
    "top-left", "top", "top-right",
    "left", "centre", "right",
    "bottom-left", "bottom", "bottom-right",
)  # fmt: skip
# Index (sign of row step + 1) * 3 + (sign of column step + 1); the middle entry is "does not move".
DIRECTIONS = ("up-left", "up", "up-right", "left", "nowhere", "right", "down-left", "down", "down-right")

TIMINGS = ("throughout", "second-half", "first-half")  # always visible, appears halfway, vanishes halfway
LETTERS = ("A", "C", "E", "F", "H", "K", "L", "M", "P", "T", "U", "X")
CORNERS = ("top-left", "top-right", "bottom-left", "bottom-right")
WINDOWS = ("start", "middle", "end")
NUMBERS = ("zero", "one", "two", "three")
WORDS = {  # every word that names a fact, by what it names
    "colour": COLOUR_NAMES, "shape": SHAPES, "size": SIZES, "background": BACKGROUND_NAMES, "texture": TEXTURES,
    "region": REGIONS, "direction": DIRECTIONS, "timing": TIMINGS, "letter": LETTERS, "window": WINDOWS,
    "count": NUMBERS,
}  # fmt: skip

FRAME_SIZE = 128
GRID_STEP_PX = 4  # centres snap to this grid: few sub-patch phases make fine shape learnable
CELL_PX = 16  # what one visual token shows: 2x2 patches of 8 px
CELL_SIDE = FRAME_SIZE // CELL_PX
NUM_SLOTS = 8  # the canonical sampling: one frame in the middle of each eighth of the clip
SCENE_DURATION_S = 4.0

TEST_SEEDS = range(100_000)
TRAIN_SEEDS = range(1_000_000, 2**40)  # some of the seeds in between were used to choose methods

_REGION_CENTRES_PX = (32, 64, 96)
_HALF_TIMES = (3 / 8, 4 / 8, 5 / 8)  # slot borders, so that jittered samples never straddle an event
_WINDOW_SLOTS = ((0, 1, 2), (3, 4), (5, 6, 7))
_DWELL = 0.15  # share of the visible time spent at rest at each end, so that both ends are really seen
_MIN_GAP_PX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneObject:
    """One object; `start`/`end` index REGIONS, times are fractions of the clip."""

    shape: str
    size: str
    colour: str
    start: int
    end: int
    start_px: tuple[int, int]  # (x, y)
    end_px: tuple[int, int]
    bend_px: tuple[int, int]  # offset of the Bezier control point
    visible_from: float
    visible_to: float
    new_colour: str | None
    change_at: float

    @property
    def direction(self) -> str:
        """Direction from the start region to the end region; "nowhere" for an object that rests."""
        row = int(np.sign(self.end // 3 - self.start // 3))
        col = int(np.sign(self.end % 3 - self.start % 3))
        return DIRECTIONS[(row + 1) * 3 + col + 1]

    @property
    def timing(self) -> str:
        if self.visible_from > 0:
            return "second-half"
        return "first-half" if self.visible_to < 1 else "throughout"

    @property
    def radius(self) -> int:
        return RADIUS_PX[self.size]

    def is_visible(self, time: float) -> bool:
        return self.visible_from <= time < self.visible_to

    def colour_at(self, time: float) -> str:
        return self.new_colour if self.new_colour is not None and time >= self.change_at else self.colour

    def centre_at(self, time: float) -> tuple[int, int]:
        """Pixel centre, snapped to the grid; it follows a slightly curved path."""
        progress = (time - self.visible_from) / (self.visible_to - self.visible_from)
        u = min(max((progress - _DWELL) / (1 - 2 * _DWELL), 0.0), 1.0)
        centre = []
        for a, b, bend in zip(self.start_px, self.end_px, self.bend_px, strict=True):
            value = a + (b - a) * u + bend * 2 * u * (1 - u)
            snapped = round(float(value) / GRID_STEP_PX) * GRID_STEP_PX
            centre.append(min(max(snapped, 16), FRAME_SIZE - 16))
        return centre[0], centre[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A letter plate shown in one corner for one or two frame slots."""

    letter: str
    corner: int
    window: int
    shown_from: float
    shown_to: float

    def is_visible(self, time: float) -> bool:
        return self.shown_from <= time < self.shown_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything a clip shows; things are in reading order of the regions they start in."""

    seed: int
    background: str
    texture: str
    things: tuple[SceneObject, ...]
    signs: tuple[Sign, ...]
    shake_px: tuple[tuple[int, int], ...]  # camera offset per slot


def sample_scene(seed: int) -> Scene:
    """The scene of a seed; the same seed gives the same scene on every machine."""
    rng = np.random.default_rng([seed, 7])
    shakes = rng.random() < 0.25
    shake = rng.integers(-1, 2, size=(NUM_SLOTS, 2)) * GRID_STEP_PX if shakes else np.zeros((NUM_SLOTS, 2), int)
    return Scene(
        seed=seed,
        background=choose(rng, BACKGROUND_NAMES),
        texture=choose(rng, TEXTURES),
        things=_sample_things(rng),
        signs=_sample_signs(rng),
        shake_px=tuple((int(x), int(y)) for x, y in shake),
    )


def choose(rng: np.random.Generator, options: Sequence[Option]) -> Option:
    """One of the options, all equally likely."""
    return options[int(rng.integers(len(options)))]


def _sample_things(rng: np.random.Generator) -> tuple[SceneObject, ...]:
    count = int(rng.choice(3, p=(0.3, 0.4, 0.3))) + 1
    shapes = rng.permutation(len(SHAPES))[:count]
    colours = rng.permutation(len(COLOUR_NAMES))  # no colour occurs twice in a clip, old or new
    things: list[SceneObject] = []
    for index in range(count):
        pair = (COLOUR_NAMES[colours[2 * index]], COLOUR_NAMES[colours[2 * index + 1]])
        for _ in range(40):  # rejection: objects never cover each other, so that every fact is visible
            thing = _sample_thing(rng, SHAPES[shapes[index]], pair)
            if all(_apart(thing, other) for other in things):
                things.append(thing)
                break
    return tuple(sorted(things, key=lambda thing: thing.start))


def _sample_thing(rng: np.random.Generator, shape: str, colours: tuple[str, str]) -> SceneObject:
    start = int(rng.integers(len(REGIONS)))
    rests = rng.random() < 0.4
    end = start if rests else int(rng.choice([region for region in range(len(REGIONS)) if region != start]))
    start_px = _region_pixel(rng, start)
    end_px = start_px if rests else _region_pixel(rng, end)
    bend = (0, 0) if rests else (int(rng.integers(-12, 13)), int(rng.integers(-12, 13)))
    timing = rng.random()
    half = float(rng.choice(_HALF_TIMES))
    visible_from = half if timing < 0.25 else 0.0
    visible_to = half if 0.25 <= timing < 0.5 else 1.0
    changes = rng.random() < (0.3 if timing < 0.5 else 0.5)
    return SceneObject(
        shape=shape,
        size=choose(rng, SIZES),
        colour=colours[0],
        start=start,
        end=end,
        start_px=start_px,
        end_px=end_px,
        bend_px=bend,
        visible_from=visible_from,
        visible_to=visible_to,
        new_colour=colours[1] if changes else None,
        change_at=round((visible_from + visible_to) / 2 * NUM_SLOTS) / NUM_SLOTS,
    )


def _region_pixel(rng: np.random.Generator, region: int) -> tuple[int, int]:
    jitter = rng.integers(-2, 3, size=2) * GRID_STEP_PX
    return _REGION_CENTRES_PX[region % 3] + int(jitter[0]), _REGION_CENTRES_PX[region // 3] + int(jitter[1])


def _apart(one: SceneObject, other: SceneObject) -> bool:
    if one.start == other.start:  # captions order the objects by their start
        return False
    for time in (np.arange(32) + 0.5) / 32:
        if one.is_visible(time) and other.is_visible(time):
            (x1, y1), (x2, y2) = one.centre_at(time), other.centre_at(time)
            if (x1 - x2) ** 2 + (y1 - y2) ** 2 < (one.radius + other.radius + _MIN_GAP_PX) ** 2:
                return False
    return True


def _sample_signs(rng: np.random.Generator) -> tuple[Sign, ...]:
    count = int(rng.choice(4, p=(0.1, 0.2, 0.4, 0.3)))
    windows = sorted(rng.permutation(len(_WINDOW_SLOTS))[:count])
    letters = rng.permutation(len(LETTERS))
    signs = []
    for index, window in enumerate(windows):
        slots = _WINDOW_SLOTS[window]
        shown = 1 if rng.random() < 0.5 else 2
        first = int(rng.choice(slots[: len(slots) - shown + 1]))
        signs.append(
            Sign(
                letter=LETTERS[letters[index]],
                corner=int(rng.integers(len(CORNERS))),
                window=int(window),
                shown_from=first / NUM_SLOTS,
                shown_to=(first + shown) / NUM_SLOTS,
            )
        )
    return tuple(signs)
