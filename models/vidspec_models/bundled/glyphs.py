"""The letter plates: 5x7 glyphs, doubled, black on white, exactly one visual token large."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .attributes import CELL_PX

_ROWS = {
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "C": "01111 10000 10000 10000 10000 10000 01111",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "U": "10001 10001 10001 10001 10001 10001 01110",
    "X": "10001 10001 01010 00100 01010 10001 10001",
}


@lru_cache(maxsize=len(_ROWS))
def glyph_plate(letter: str) -> NDArray[np.uint8]:
    """Gray values [16, 16] of one letter."""
    bits = np.array([[int(bit) for bit in row] for row in _ROWS[letter].split()], np.uint8)
    plate = np.full((CELL_PX, CELL_PX), 250, np.uint8)
    plate[1:15, 3:13] -= bits.repeat(2, axis=0).repeat(2, axis=1) * 240
    return plate
