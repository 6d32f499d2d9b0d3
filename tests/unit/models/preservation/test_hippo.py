"""HIPPO's scores: temporal novelty, spatial distinctness, ranks, debiased attention, and a diverse choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vidspec_models.preservation.hippo import debiased, greedy_map, ranks, relative
from vidspec_models.preservation.selection import Candidates, centred
from vidspec_models.preservation.strategies import temporal_novelty
from vidspec_models.prompt import CLIP_GAP


def places(num_frames: int, num_rows: int, num_columns: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(num_frames), torch.arange(num_rows), torch.arange(num_columns))


def cells_at(grid: Tensor, units: Tensor | None = None) -> Candidates:
    """Cells at these places; `units` [C, hidden] must be as `centred` makes them."""
    cells = Candidates.of(torch.empty(len(grid), 0), grid)
    vars(cells)["units"] = units
    return cells


def units_of(num_cells: int) -> Tensor:
    return centred(torch.randn(num_cells, 10, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(params=[(4, 5), (7, 3)])
def holey(request: pytest.FixtureRequest) -> Tensor:
    """Cells of three frames, wide or high, with indices 2, 5, 6; a third of the cells are missing."""
    grid = places(3, *request.param)
    grid[:, 0] = torch.tensor([2, 5, 6])[grid[:, 0]]
    return grid[torch.rand(len(grid), generator=torch.Generator().manual_seed(1)) < 0.66]


def near(grid: Tensor, cell: int, frame: int) -> list[int]:
    """Cells of a frame that are at most one step from the cell's place."""
    distance = (grid[:, 1:] - grid[cell, 1:]).abs().max(1).values
    return ((grid[:, 0] == frame) & (distance <= 1)).nonzero()[:, 0].tolist()


def test_novelty_is_what_the_formula_says_cell_by_cell(holey: Tensor) -> None:
    units = units_of(len(holey))
    expected: list[float | None] = []
    for cell, (frame, _, _) in enumerate(holey.tolist()):
        before = near(holey, cell, {2: -1, 5: 2, 6: 5}[frame])
        expected.append(1 - max(float(units[cell] @ units[other]) for other in before) if before else None)
    known = [value for value in expected if value is not None]
    neutral = sum(known) / len(known)
    filled = torch.tensor([neutral if value is None else value for value in expected])
    torch.testing.assert_close(temporal_novelty(cells_at(holey, units)), filled, atol=1e-5, rtol=1e-5)


def test_nothing_in_another_video_is_an_earlier_frame_or_shows_what_this_one_shows() -> None:
    one = places(2, 2, 2)
    grid = torch.cat((one, one + torch.tensor([2 + CLIP_GAP, 0, 0])))
    units = units_of(8).repeat(2, 1)  # the same video twice
    novelty = temporal_novelty(cells_at(grid, units))
    torch.testing.assert_close(novelty[:8], novelty[8:])
    torch.testing.assert_close(novelty[4:8], temporal_novelty(cells_at(one, units[:8]))[4:])
    quality = torch.full((16,), 0.5)
    quality[[0, 8]] = 1.0  # the same cell in both videos: neither lowers the other
    assert set(greedy_map(quality, units, grid[:, 0], 2).tolist()) == {0, 8}


def test_in_a_video_of_one_frame_no_cell_is_newer_than_another() -> None:
    assert temporal_novelty(cells_at(places(1, 3, 3), units_of(9))).unique().tolist() == [0.0]


def test_distinctness_is_what_the_formula_says_cell_by_cell(holey: Tensor) -> None:
    units = units_of(len(holey))
    expected = []
    for cell, (frame, _, _) in enumerate(holey.tolist()):
        beside = [other for other in near(holey, cell, frame) if other != cell]
        mean = sum(float(units[cell] @ units[other]) for other in beside) / max(len(beside), 1)
        expected.append(1 - mean)
    found = cells_at(holey, units).distinctiveness
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_lone_object_is_more_distinct_than_what_surrounds_it() -> None:
    """This is why units are centred: raw cosines prefer the neighbours of an object to the object."""
    features = torch.ones(49, 8) + 0.01 * torch.randn(49, 8, generator=torch.Generator().manual_seed(0))
    features[24] = 6 * torch.eye(8)[0]  # in the middle of 7 x 7
    scores = Candidates.of(features, places(1, 7, 7)).distinctiveness
    assert int(scores.argmax()) == 24


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=40))
def test_ranks_are_between_0_and_1_keep_the_order_and_share_ties(values: list[int]) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    found = ranks(scores)
    assert 0 <= float(found.min()) <= float(found.max()) <= 1
    assert float(found.mean()) == pytest.approx(0.5, abs=1e-5)
    assert torch.equal(scores[:, None] < scores, found[:, None] < found)


@settings(max_examples=30)
@given(st.floats(0.1, 100), st.floats(-50, 50))
def test_ranks_do_not_depend_on_the_scale_of_a_score(scale: float, shift: float) -> None:
    scores = torch.randn(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ranks(scores * scale + shift), ranks(scores))


def test_relative_scores_keep_what_is_far_above_the_rest_apart() -> None:
    found = relative(torch.tensor([0.0, 0.01, 0.04, 1.0]) * 7)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.1, 0.2, 1.0]))
    assert not relative(torch.zeros(3)).any()


def test_debiasing_takes_away_what_a_place_gets_in_every_frame() -> None:
    grid = cells_at(places(6, 4, 4))
    content = torch.ones(6, 16)
    content[3, 5] = 4.0  # the one thing to see
    biased = content.clone()
    biased[:, 15] *= 20.0  # a place that attracts attention whatever it shows
    biased[5] *= 3.0  # as does the last frame
    assert int(biased.flatten().argmax()) != 3 * 16 + 5
    found = debiased(biased.flatten(), grid, power=1.0)
    assert int(found.argmax()) == 3 * 16 + 5
    untouched = debiased(biased.flatten(), grid, power=0.0)
    assert int(untouched.argmax()) % 16 == 15


def test_debiasing_nothing_gives_nothing() -> None:
    assert not debiased(torch.zeros(48), cells_at(places(3, 4, 4)), 0.5).any()


def other_units(num_cells: int, hidden: int = 12) -> Tensor:
    features = torch.randn(num_cells, hidden, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(features, dim=-1)


def quality_of(num_cells: int) -> Tensor:
    return torch.rand(num_cells, generator=torch.Generator().manual_seed(1))


def one_frame(num_cells: int) -> Tensor:
    return torch.zeros(num_cells, dtype=torch.int64)


def test_every_step_takes_the_cell_that_makes_the_determinant_largest() -> None:
    quality, units, frames = quality_of(24), other_units(24, hidden=4), torch.arange(24) // 4
    fading = 0.78 ** (frames[:, None] - frames).abs()
    matrix = quality[:, None] * (units @ units.T).clamp(min=0) * fading * quality + 1e-3 * torch.eye(24)
    chosen: list[int] = []
    for _ in range(12):
        rest = [cell for cell in range(24) if cell not in chosen]
        gains = [float(torch.linalg.det(matrix[[*chosen, cell]][:, [*chosen, cell]].double())) for cell in rest]
        chosen.append(rest[max(range(len(rest)), key=gains.__getitem__)])
    assert greedy_map(quality, units, frames, 12).tolist() == chosen


def test_a_copy_of_a_kept_cell_comes_after_everything_of_some_worth() -> None:
    units = other_units(10)
    units[1] = units[0]
    quality = torch.full((10,), 0.5)
    quality[[0, 1]] = 1.0
    assert greedy_map(quality, units, one_frame(10), 10).tolist()[0] == 0
    assert greedy_map(quality, units, one_frame(10), 10).tolist()[-1] == 1


def test_of_two_copies_the_one_in_the_frame_farther_away_comes_first() -> None:
    units = other_units(1).repeat(3, 1)
    quality = torch.tensor([1.0, 0.5, 0.5])
    assert greedy_map(quality, units, torch.tensor([3, 4, 0]), 2).tolist() == [0, 2]


@pytest.mark.parametrize("budget", [0, 1, 16, 40])
def test_cells_without_features_are_taken_by_quality(budget: int) -> None:
    quality = quality_of(40)
    order = quality.argsort(descending=True)
    assert greedy_map(quality, torch.zeros(40, 12), one_frame(40), budget).tolist() == order[:budget].tolist()


@pytest.mark.parametrize("quality", [torch.zeros(64), torch.ones(64), quality_of(64)])
def test_no_cell_is_taken_twice_where_all_are_the_same(quality: Tensor) -> None:
    same = other_units(1).repeat(64, 1)
    chosen = greedy_map(quality, same, one_frame(64), 32).tolist()
    assert len(chosen) == len(set(chosen)) == 32


def test_no_cell_is_taken_twice_where_those_taken_show_the_others_more_than_once() -> None:
    """Negative cosines count as 0, so such remainders can fall below 0, of which there is no root."""
    angles = torch.arange(8) * torch.pi / 4
    units = torch.stack((angles.cos(), angles.sin()), 1)
    assert len(set(greedy_map(torch.ones(8), units, one_frame(8), 8).tolist())) == 8
