"""The greedy maximum of a determinant: against the definition, and where features say nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vidspec_models.preservation.diversity import diverse


def units_of(num_cells: int, hidden: int = 12) -> Tensor:
    features = torch.randn(num_cells, hidden, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(features, dim=-1)


def quality_of(num_cells: int) -> Tensor:
    return torch.rand(num_cells, generator=torch.Generator().manual_seed(1))


def one_frame(num_cells: int) -> Tensor:
    return torch.zeros(num_cells, dtype=torch.int64)


def test_every_step_takes_the_cell_that_makes_the_determinant_largest() -> None:
    quality, units, frames = quality_of(24), units_of(24), torch.arange(24) // 4
    fading = 0.78 ** (frames[:, None] - frames).abs()
    matrix = quality[:, None] * (units @ units.T).clamp(min=0) * fading * quality + 1e-3 * torch.eye(24)
    chosen: list[int] = []
    for _ in range(6):
        rest = [cell for cell in range(24) if cell not in chosen]
        gains = [float(torch.linalg.det(matrix[[*chosen, cell]][:, [*chosen, cell]].double())) for cell in rest]
        chosen.append(rest[max(range(len(rest)), key=gains.__getitem__)])
    assert diverse(quality, units, frames, 6).tolist() == chosen


def test_a_copy_of_a_kept_cell_comes_after_everything_of_some_worth() -> None:
    units = units_of(10)
    units[1] = units[0]
    quality = torch.full((10,), 0.5)
    quality[[0, 1]] = 1.0
    assert diverse(quality, units, one_frame(10), 10).tolist()[0] == 0
    assert diverse(quality, units, one_frame(10), 10).tolist()[-1] == 1


def test_of_two_copies_the_one_in_the_frame_farther_away_comes_first() -> None:
    units = units_of(1).repeat(3, 1)
    quality = torch.tensor([1.0, 0.5, 0.5])
    assert diverse(quality, units, torch.tensor([3, 4, 0]), 2).tolist() == [0, 2]


@pytest.mark.parametrize("budget", [0, 1, 16, 40])
def test_cells_without_features_are_taken_by_quality(budget: int) -> None:
    quality = quality_of(40)
    order = quality.argsort(descending=True)
    assert diverse(quality, torch.zeros(40, 12), one_frame(40), budget).tolist() == order[:budget].tolist()


@pytest.mark.parametrize("quality", [torch.zeros(64), torch.ones(64), quality_of(64)])
def test_no_cell_is_taken_twice_where_all_are_the_same(quality: Tensor) -> None:
    same = units_of(1).repeat(64, 1)
    chosen = diverse(quality, same, one_frame(64), 32).tolist()
    assert len(chosen) == len(set(chosen)) == 32
