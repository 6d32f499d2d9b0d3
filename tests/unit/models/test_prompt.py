"""A pruned prompt: fewer video rows, everything else unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vidspec_models.preservation.selection import CellSelector
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.prompt import CLIP_GAP, NO_CELL, Prompt, cell_rows, grid_checksum, pruned


@pytest.fixture
def prompt() -> Prompt:
    """Three text rows, 4 frames of 4 x 4 cells and a newline, five text rows."""
    num_rows = 3 + 65 + 5
    is_video = torch.zeros(num_rows, dtype=torch.bool)
    is_video[3:68] = True
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(4))
    rows = torch.arange(float(num_rows))
    return Prompt(
        ids=tuple(range(100, 100 + num_rows)),
        embeddings=rows[:, None] + torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(0)),
        rotary=(rows.view(-1, 1, 1), -rows.view(-1, 1, 1)),
        is_video=is_video,
        next_position=num_rows + 7,
        grid=torch.cat((places, torch.full((1, 3), NO_CELL))),
        deepstack=rows.expand(2, -1)[..., None],
    )


def test_rows_that_stay_keep_everything_they_had(prompt: Prompt) -> None:
    kept = torch.tensor([0, 7, 40, 64])
    less = pruned(prompt, kept)
    rows = [0, 1, 2, 3, 10, 43, 67, 68, 69, 70, 71, 72]
    assert less.ids == tuple(100 + row for row in rows)
    assert torch.equal(less.embeddings, prompt.embeddings[rows])
    assert torch.equal(less.rotary[0].flatten(), torch.tensor(rows, dtype=torch.float32))
    assert torch.equal(less.rotary[1], -less.rotary[0])
    assert less.deepstack is not None
    assert torch.equal(less.deepstack[1].flatten(), torch.tensor(rows, dtype=torch.float32))
    assert less.is_video.nonzero().flatten().tolist() == [3, 4, 5, 6]
    assert less.num_video_tokens == 4
    assert less.next_position == prompt.next_position
    assert less.grid.tolist() == [[0, 0, 0], [0, 1, 3], [2, 2, 0], [NO_CELL] * 3]


@pytest.mark.parametrize("name", STRATEGIES)
def test_at_ratio_0_the_prompt_is_the_same_object(prompt: Prompt, name: str) -> None:
    less = pruned(prompt, CellSelector(STRATEGIES[name], 0.0, prompt).kept())
    assert (less is prompt) == (name != "blind")


def test_none_is_the_same_object_at_every_ratio(prompt: Prompt) -> None:
    assert pruned(prompt, CellSelector(STRATEGIES["none"], 0.95, prompt).kept()) is prompt


def test_blind_leaves_no_cell(prompt: Prompt) -> None:
    blind = pruned(prompt, CellSelector(STRATEGIES["blind"], 0.5, prompt).kept())
    assert blind.grid.tolist() == [[NO_CELL] * 3]
    assert len(cell_rows(blind)) == 0


def test_grids_of_the_same_cells_have_the_same_checksum_whatever_lies_between(prompt: Prompt) -> None:
    without_newline = replace(prompt, grid=prompt.grid[:-1])
    assert grid_checksum(prompt) == grid_checksum(without_newline)
    turned = replace(prompt, grid=prompt.grid[:, [0, 2, 1]])
    fewer = replace(prompt, grid=prompt.grid[1:])
    assert len({grid_checksum(each) for each in (prompt, turned, fewer)}) == 3


def test_the_checksum_tells_two_videos_from_one_of_as_many_frames(prompt: Prompt) -> None:
    second = torch.tensor([CLIP_GAP, 0, 0]) * (prompt.grid[:, :1] >= 2)  # of four frames the last two
    two = replace(prompt, grid=prompt.grid + second)
    draft = replace(two, grid=two.grid[:-1].clone(), embeddings=two.embeddings[:, :2])  # without the newline
    assert grid_checksum(two) == grid_checksum(draft) != grid_checksum(prompt)
