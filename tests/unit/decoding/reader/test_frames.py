"""Display matrices: each of the eight right-angle orientations against the definition; sizes after downscaling."""

from __future__ import annotations

import struct
from itertools import product

import numpy as np
import pytest
from av.video.frame import VideoFrame
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.decoding.reader.frames import UPRIGHT, fitted_size, orientation_of, pixels_of, rotate

pytestmark = pytest.mark.unit

ONE = 1 << 16
SIDES = st.integers(1, 20_000)


def matrix(a: int, b: int, c: int, d: int) -> bytes:
    return struct.pack("=9i", a * ONE, b * ONE, 0, c * ONE, d * ONE, 0, 0, 0, 1 << 30)


EIGHT = [(a, 0, 0, d) for a, d in product((1, -1), repeat=2)] + [(0, b, c, 0) for b, c in product((1, -1), repeat=2)]


@pytest.mark.parametrize("terms", EIGHT)
def test_each_point_lands_where_the_matrix_sends_it(terms: tuple[int, int, int, int]) -> None:
    a, b, c, d = terms
    height, width = 3, 5
    stored = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    orientation = orientation_of(matrix(*terms))
    assert orientation is not None
    picture = rotate(VideoFrame.from_ndarray(stored), orientation)
    assert (picture.width, picture.height) == orientation.size(width, height)
    upright = np.frombuffer(pixels_of(picture), np.uint8).reshape(picture.height, picture.width, 3)
    points = [(a * x + c * y, b * x + d * y) for x in range(width) for y in range(height)]
    left, top = min(x for x, _ in points), min(y for _, y in points)
    for (x, y), (to_x, to_y) in zip(product(range(width), range(height)), points, strict=True):
        assert (upright[to_y - top, to_x - left] == stored[y, x]).all()


def test_the_identity_needs_no_turning() -> None:
    assert orientation_of(matrix(1, 0, 0, 1)) == UPRIGHT


@pytest.mark.parametrize("raw", [b"", matrix(1, 1, -1, 1), matrix(0, 0, 0, 0), matrix(1, 0, 0, 1)[:20]])
def test_other_angles_and_short_matrices_are_not_understood(raw: bytes) -> None:
    assert orientation_of(raw) is None


@given(width=SIDES, height=SIDES, max_pixels=st.integers(1, 10**8))
def test_a_fitted_size_fits_and_keeps_its_shape(width: int, height: int, max_pixels: int) -> None:
    wide, high = fitted_size(width, height, max_pixels)
    assert 1 <= wide <= width
    assert 1 <= high <= height
    assert wide * high <= max_pixels
    if width * height <= max_pixels:
        assert (wide, high) == (width, height)
    elif min(wide, high) > 1:  # rounding down changes either side by less than a pixel
        assert wide * height <= width * (high + 1)
        assert width * high <= (wide + 1) * height


@pytest.mark.parametrize(
    ("size", "fitted"), [((3840, 2160), (1365, 768)), ((2160, 3840), (768, 1365)), ((1280, 720), (1280, 720))]
)
def test_sizes_of_the_default(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert fitted_size(*size, 1024 * 1024) == fitted
