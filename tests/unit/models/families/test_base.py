"""How several videos are told apart in one prompt."""

from __future__ import annotations

import pytest
import torch

from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import cell_grid, concatenate_grids
from vidspec_models.prompt import CLIP_GAP

pytestmark = pytest.mark.unit


def encoded(num_frames: int) -> EncodedVideo:
    shape = (num_frames, 1, 2)
    rows = torch.zeros(num_frames * 2, 4)
    return EncodedVideo(placeholder_text="v", features=rows, shape=shape, grid=cell_grid(*shape))


def test_frames_are_counted_on_from_video_to_video_with_a_gap_between_two() -> None:
    grid = concatenate_grids([encoded(2), encoded(1), encoded(1)], torch.device("cpu"))
    frames = [0, 0, 1, 1, *[2 + CLIP_GAP] * 2, *[3 + 2 * CLIP_GAP] * 2]
    assert grid.tolist() == [[frame, 0, place % 2] for place, frame in enumerate(frames)]


def test_a_prompt_without_videos_has_no_cells() -> None:
    assert concatenate_grids([], torch.device("cpu")).shape == (0, 3)
