"""Where chosen frames end up: one block of memory [T, H, W, 3], bounded before it is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable

from vidspec_service.decoding.limits import DecodingLimits, over_limit
from vidspec_service.decoding.orientation import Orientation, write_turned

Allocate = Callable[[int], memoryview]  # bytes wanted -> writable memory of that size


def fitted_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size itself if it has at most `max_pixels`; else the largest of its shape that does, at least 1 each."""
    if width * height <= max_pixels:
        return width, height
    shrink = math.sqrt(max_pixels / (width * height))
    wide, high = max(int(width * shrink), 1), min(max(int(height * shrink), 1), max_pixels)
    return min(wide, max_pixels // high), high  # a strip that is one pixel wide or high loses its shape


def check_decoded_bytes(num_frames: int, width: int, height: int, limits: DecodingLimits) -> int:
    """Bytes that so many RGB frames take; VideoTooLarge if over the limit."""
    needed = num_frames * width * height * 3
    if needed > limits.max_decoded_bytes:
        fitting = limits.max_decoded_bytes // (width * height * 3)
        fact = f"{num_frames} frames of {width}x{height} pixels take {needed:,} bytes ({fitting} would fit)"
        raise over_limit(fact, f"{limits.max_decoded_bytes:,}", "VIDSPEC_MAX_DECODED_BYTES")
    return needed


class Canvas:
    """Takes stored RGB pictures of one size in order and lays them down upright."""

    def __init__(
        self,
        num_frames: int,
        stored_size: tuple[int, int],  # (width, height), before turning
        orientation: Orientation,
        limits: DecodingLimits,
        allocate: Allocate,
    ) -> None:
        self.stored_size = stored_size
        self.upright_size = orientation.size(*stored_size)
        self._orientation = orientation
        self._memory = allocate(check_decoded_bytes(num_frames, *stored_size, limits))
        self._picture_bytes = stored_size[0] * stored_size[1] * 3
        self._used = 0

    def add(self, picture: memoryview, line_bytes: int) -> None:
        """Copy one picture whose rows lie `line_bytes` apart."""
        out = self._memory[self._used : self._used + self._picture_bytes]
        self._used += self._picture_bytes
        row_bytes = self.stored_size[0] * 3
        if not self._orientation.is_upright:
            write_turned(picture, line_bytes, self.stored_size, self._orientation, out)
        elif line_bytes == row_bytes:
            out[:] = picture[: self._picture_bytes]
        else:
            for row in range(self.stored_size[1]):
                start = row * line_bytes
                out[row * row_bytes : (row + 1) * row_bytes] = picture[start : start + row_bytes]
