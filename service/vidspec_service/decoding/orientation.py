"""How a stored picture must be turned and mirrored to stand upright: display matrices, read and applied."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_FIXED_ONE = 1 << 16  # FFmpeg's display matrices are 16.16 fixed point


@dataclass(frozen=True, slots=True)
class Orientation:
    """One of the eight right-angled orientations: exchange rows and columns first, then mirror."""

    swap: bool = False
    mirror_columns: bool = False
    mirror_rows: bool = False

    @property
    def is_upright(self) -> bool:
        return self == UPRIGHT

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after turning."""
        return (height, width) if self.swap else (width, height)


UPRIGHT = Orientation()


def orientation_of(matrix: bytes) -> Orientation | None:
    """Read a display matrix (nine native int32); None if it is no multiple of 90 degrees.

    The matrix maps a stored point (x, y), y down, to (a·x + c·y, b·x + d·y).
    """
    if len(matrix) < 36:
        return None
    a, b, _, c, d = struct.unpack_from("=5i", matrix)
    if b == c == 0 and a and d:
        return Orientation(mirror_columns=a < 0, mirror_rows=d < 0)
    if a == d == 0 and b and c:
        return Orientation(swap=True, mirror_columns=c < 0, mirror_rows=b < 0)
    return None


def write_turned(
    picture: memoryview, line_bytes: int, size: tuple[int, int], orientation: Orientation, out: memoryview
) -> None:
    """Copy a stored RGB picture of `size` (width, height), rows `line_bytes` apart, upright into `out`.

    Colour by colour, in strides: numpy would do the same, but a decode child starts twice as fast without it.
    """
    width, height = size
    if orientation.swap:  # a column becomes a row
        num_rows, row_len, row_step, step = width, height, 3, line_bytes
    else:
        num_rows, row_len, row_step, step = height, width, line_bytes, 3
    for row in range(num_rows):
        start = row_step * (num_rows - 1 - row if orientation.mirror_rows else row)
        for colour in range(3):
            line = picture[start + colour : start + colour + (row_len - 1) * step + 1 : step]
            first = row * row_len * 3 + colour
            out[first : first + row_len * 3 : 3] = line[::-1] if orientation.mirror_columns else line
