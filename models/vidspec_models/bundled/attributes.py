"""The closed vocabulary of the bundled domain: what a clip can show, and the words that name it."""

from __future__ import annotations

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

FRAME_SIZE = 128
GRID_STEP_PX = 4  # centres snap to this grid: few sub-patch phases make fine shape learnable
CELL_PX = 16  # one visual token after 2x2 pooling of 8 px patches
NUM_SLOTS = 8  # the canonical sampling: one frame in the middle of each eighth of the clip
SCENE_DURATION_S = 4.0
