"""Which cells are kept of each video, whatever other rows are among a prompt's video rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vidspec_models.prompt import CLIP_GAP, NO_CELL
from vidspec_service.engine.draft.request import MAX_VIEW_CELLS, seen_cells
from vidspec_service.engine.types import SeenCells


def dense(cells: SeenCells) -> NDArray[np.uint8]:
    bits = np.frombuffer(cells.bits, np.uint8)
    return np.unpackbits(bits, bitorder="little", count=int(np.prod(cells.shape))).reshape(cells.shape)


def test_each_video_has_its_own_frames_and_rows_that_are_no_cells_are_left_out() -> None:
    first = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3))
    second = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(2))
    second[:, 0] += 2 + CLIP_GAP
    grid = torch.cat((first, torch.full((1, 3), NO_CELL), second))
    kept = torch.tensor([0, 11, 12, 14])
    one, other = seen_cells(grid[kept], [(2, 2, 3), (1, 1, 2)])
    assert one.shape == (2, 2, 3)
    assert [tuple(place) for place in np.argwhere(dense(one))] == [(0, 0, 0), (1, 1, 2)]
    assert other.shape == (1, 1, 2)
    assert dense(other).tolist() == [[[0, 1]]]


def test_a_prompt_without_a_video_shows_nothing() -> None:
    assert seen_cells(torch.empty(0, 3, dtype=torch.int64), ()) == ()


def test_more_than_a_channel_should_carry_is_not_told() -> None:
    grid = torch.zeros(1, 3, dtype=torch.int64)
    assert seen_cells(grid, [(1, 1, MAX_VIEW_CELLS)])
    assert seen_cells(grid, [(1, 1, MAX_VIEW_CELLS), (1, 1, 1)]) == ()


def test_of_a_video_that_was_chosen_from_the_frames_and_places_that_are_not_there_count_too() -> None:
    (told,) = seen_cells(torch.tensor([[1, 0, 1], [3, 2, 0]]), [(5, 4, 3)])
    assert told.shape == (5, 4, 3)
    assert [tuple(place) for place in np.argwhere(dense(told))] == [(1, 0, 1), (3, 2, 0)]
