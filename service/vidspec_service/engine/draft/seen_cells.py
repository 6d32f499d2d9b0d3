"""Which cells of which frame are kept, a bit each: small enough for a channel, for requests that ask."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from torch import Tensor

from vidspec_models.inputs import CLIP_GAP
from vidspec_service.engine.types import SeenCells

MOST_TOLD = 512 * 1024  # places: half of what a message may have; longer contexts than a million tokens are untold


def seen_cells(kept: Tensor, shapes: Sequence[tuple[int, int, int]]) -> tuple[SeenCells, ...]:
    """One for each video of a prompt, in order; none if they have more than MOST_TOLD places.

    `kept`, int64 [K, 3], are rows of a prompt's `grid`, `shapes` its `video_shapes`. What is no cell is left out.
    """
    if sum(map(prod, shapes)) > MOST_TOLD:
        return ()
    places, first, found = kept.cpu().numpy(), 0, list[SeenCells]()
    for shape in shapes:
        mine = places[(places[:, 0] >= first) & (places[:, 0] < first + shape[0])] - (first, 0, 0)
        dense = np.zeros(shape, np.bool_)
        dense[tuple(mine.T)] = True
        found.append(SeenCells(shape=shape, bits=np.packbits(dense, bitorder="little").tobytes()))
        first += shape[0] + CLIP_GAP
    return tuple(found)
