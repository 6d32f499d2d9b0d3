"""Dense truth per visual token: what the tower must see in a cell, and what the target should know of a thing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vidspec_models.bundled.render import OWNER_SIGN
from vidspec_models.bundled.scene import CELL_PX, CELL_SIDE, NUM_SLOTS, REGIONS, WORDS, Scene

IGNORE = -100
Labels = NDArray[np.int64]
CELL_HEADS = {
    "kind": 3,
    **{name: len(WORDS[name]) for name in ("colour", "shape", "size", "region", "letter", "background", "texture")},
    "row": CELL_SIDE,
    "column": CELL_SIDE,
}
STORY_HEADS = {
    "start": len(REGIONS), "direction": len(WORDS["direction"]), "timing": len(WORDS["timing"]),
    "first_colour": len(WORDS["colour"]),
}  # fmt: skip
_THING_COVER = 0.12  # a cell shows a thing if this much of it is covered; slivers below are ignored
_MARGIN_PX = 4


@dataclass(frozen=True, slots=True)
class Cells:
    """Who owns each cell [T, 8, 8]: coverage of the main owner, its id, and whether the cell is strictly empty."""

    owner: Labels  # 0 where nothing covers enough
    is_clear: NDArray[np.bool_]  # not one pixel of anything
    is_strict_background: NDArray[np.bool_]  # nothing within 4 px


def find_cells(owners: NDArray[np.uint8]) -> Cells:
    """Reduce an owner map [T, 128, 128] to cells."""
    tiles = owners.reshape(len(owners), CELL_SIDE, CELL_PX, CELL_SIDE, CELL_PX).transpose(0, 1, 3, 2, 4)
    flat = tiles.reshape(len(owners), CELL_SIDE, CELL_SIDE, -1)
    best = np.zeros(flat.shape[:3], np.int64)
    cover = np.full(flat.shape[:3], _THING_COVER)
    for owner in np.unique(owners):
        if owner:
            share = (flat == owner).mean(axis=-1)
            wins = share > cover
            best[wins], cover[wins] = int(owner), share[wins]
    near = np.pad(owners > 0, ((0, 0), (_MARGIN_PX, _MARGIN_PX), (_MARGIN_PX, _MARGIN_PX)))
    wide = np.lib.stride_tricks.sliding_window_view(near, CELL_PX + 2 * _MARGIN_PX, axis=1)[:, ::CELL_PX].any(-1)
    wide = np.lib.stride_tricks.sliding_window_view(wide, CELL_PX + 2 * _MARGIN_PX, axis=2)[:, :, ::CELL_PX].any(-1)
    touched = np.asarray(flat.any(axis=-1))
    return Cells(owner=best, is_clear=~touched, is_strict_background=~np.asarray(wide))


def cell_labels(scene: Scene, times: NDArray[np.float64], cells: Cells) -> dict[str, Labels]:
    """One label array [T, 8, 8] per head of CELL_HEADS; IGNORE where a head has nothing to say."""
    labels = {name: np.full(cells.owner.shape, IGNORE, np.int64) for name in CELL_HEADS}
    labels["row"][:] = np.arange(CELL_SIDE)[None, :, None]
    labels["column"][:] = np.arange(CELL_SIDE)[None, None, :]
    labels["kind"][cells.is_clear] = 0
    for name, word in (("background", scene.background), ("texture", scene.texture)):
        labels[name][cells.is_clear] = WORDS[name].index(word)
    for t, time in enumerate(times):
        dx, dy = scene.shake_px[min(int(time * NUM_SLOTS), NUM_SLOTS - 1)]
        for index, thing in enumerate(scene.things):
            mine = cells.owner[t] == index + 1
            x, y = thing.centre_at(float(time))
            column, row = (min(max((v - 16) // 32, 0), 2) for v in (x + dx, y + dy))
            labels["kind"][t][mine] = 1
            labels["region"][t][mine] = row * 3 + column
            words = {"colour": thing.colour_at(float(time)), "shape": thing.shape, "size": thing.size}
            for name, word in words.items():
                labels[name][t][mine] = WORDS[name].index(word)
        for index, sign in enumerate(scene.signs):
            mine = cells.owner[t] == OWNER_SIGN + index
            labels["kind"][t][mine] = 2
            labels["letter"][t][mine] = WORDS["letter"].index(sign.letter)
    return labels


def story_labels(scene: Scene, times: NDArray[np.float64], cells: Cells) -> dict[str, Labels]:
    """What a thing's late cells can tell about its past: labels [T, 8, 8] per head of STORY_HEADS.

    Only cells of the last third of a thing's visible time are labelled: earlier ones cannot know.
    """
    labels = {name: np.full(cells.owner.shape, IGNORE, np.int64) for name in STORY_HEADS}
    for index, thing in enumerate(scene.things):
        late = thing.visible_from + (thing.visible_to - thing.visible_from) * 0.6
        values = {
            "start": thing.start,
            "direction": WORDS["direction"].index(thing.direction),
            "timing": WORDS["timing"].index(thing.timing),
            "first_colour": WORDS["colour"].index(thing.colour),
        }
        for t, time in enumerate(times):
            if time < late:
                continue
            mine = cells.owner[t] == index + 1
            for name, value in values.items():
                # Whether a thing will vanish is not known before the last frame.
                if name != "timing" or time > 0.9 or thing.timing == "second-half":
                    labels[name][t][mine] = value
    return labels
