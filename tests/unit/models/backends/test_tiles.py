"""Operations on single lines of numbers, against NumPy: the same bits, wherever a number lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from vidspec_models.backends.cpu import tiles
from vidspec_models.backends.cpu.packing import LANES


def jitted(function: Any) -> Any:
    return njit(function)


@jitted
def largest(numbers: Any) -> float:
    return float(tiles.largest(numbers.ctypes.data, len(numbers) // LANES))


@jitted
def rotate(head: Any, table: Any) -> None:
    tiles.rotate(head.ctypes.data, table.ctypes.data, len(head) // LANES)


@jitted
def clear(numbers: Any) -> None:
    tiles.clear(numbers.ctypes.data, len(numbers) // LANES)


def numbers(count: int) -> Any:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("place", range(2 * LANES))
def test_the_largest_number_is_found_in_any_lane(place: int) -> None:
    line = -np.abs(numbers(2 * LANES)) - 1
    line[place] = -0.5
    assert largest(line) == -0.5


@pytest.mark.parametrize("width", [2 * LANES, 4 * LANES, 6 * LANES])
def test_a_rotation_pairs_each_number_with_that_of_the_other_half(width: int) -> None:
    head, table = numbers(width), numbers(2 * width).reshape(2, width)
    cosines, sines = table
    expected = head * cosines + np.roll(head, width // 2) * sines
    rotate(head, table)
    assert np.array_equal(head, expected)


def test_only_the_numbers_that_are_asked_for_become_0() -> None:
    line = numbers(3 * LANES)
    clear(line[: 2 * LANES])
    assert not line[: 2 * LANES].any()
    assert line[2 * LANES :].all()
