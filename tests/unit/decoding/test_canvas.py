"""Sizes that frames are scaled down to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.decoding.canvas import fitted_size

SIDES = st.integers(1, 20_000)


@given(width=SIDES, height=SIDES, max_pixels=st.integers(1, 10**8))
def test_a_fitted_size_fits_and_keeps_its_shape(width: int, height: int, max_pixels: int) -> None:
    wide, high = fitted_size(width, height, max_pixels)
    assert 1 <= wide <= width
    assert 1 <= high <= height
    assert wide * high <= max_pixels
    if width * height <= max_pixels:
        assert (wide, high) == (width, height)
    elif min(wide, high) > 1:  # rounding down moves either side by less than a pixel
        assert wide * height <= width * (high + 1)
        assert width * high <= (wide + 1) * height


@pytest.mark.parametrize(
    ("size", "fitted"), [((3840, 2160), (1365, 768)), ((2160, 3840), (768, 1365)), ((1280, 720), (1280, 720))]
)
def test_sizes_of_the_default(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert fitted_size(*size, 1024 * 1024) == fitted
