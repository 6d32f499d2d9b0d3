"""EarlyTom: which frames are merged, which frame represents which, and which tokens stay."""

from __future__ import annotations

from itertools import pairwise
from math import cos, radians

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vidspec_models.compression.early_tom import choose, likenesses, merge_frames, merging_layers, segments


def scenes(*lengths: int, drift: float = 0.0, seed: int = 0) -> Tensor:
    """Frames [F, P, W] of unrelated scenes, each of which drifts away from its first frame."""
    generator = torch.Generator().manual_seed(seed)
    frames = []
    for length in lengths:
        scene, away = torch.randn(2, 6, 64, generator=generator)
        frames += [scene + drift * number * away for number in range(length)]
    return torch.stack(frames)


def turned(*degrees: float) -> Tensor:
    """Frames [F, P, 2] whose similarity is the cosine of the angle between them."""
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack((angles.cos(), angles.sin()), 1)[:, None].expand(-1, 3, -1)


@pytest.mark.parametrize(("num_layers", "numbers"), [(26, [8, 21, 23]), (3, [0]), (24, [7, 19, 21]), (1, []), (2, [0])])
def test_frames_are_merged_behind_the_layers_of_the_code_and_never_behind_the_last(
    num_layers: int, numbers: list[int]
) -> None:
    assert merging_layers(num_layers) == numbers


def test_a_segment_ends_where_frames_are_no_longer_like_its_first() -> None:
    assert segments(likenesses(scenes(3, 4, 1))) == [range(3), range(3, 7), range(7, 8)]
    assert segments(likenesses(scenes(1))) == [range(1)]


def test_of_a_scene_that_stands_still_first_and_last_stay_and_its_middle_is_halved() -> None:
    frames = scenes(8)
    merged, stands_for = merge_frames(frames)
    assert torch.equal(merged[0], frames[0])
    assert torch.equal(merged[-1], frames[-1])
    assert stands_for == [0, 1, 1, 2, 2, 3, 3, 4]


def test_two_frames_become_their_mean_weighted_by_what_is_alike() -> None:
    frames = turned(0, 30, 34, -34, -20)
    merged, stands_for = merge_frames(frames)
    assert stands_for == [0, 1, 1, 2, 3]
    weight = cos(radians(4)) / (cos(radians(4)) + cos(radians(68)))
    assert weight > 0.7
    assert torch.allclose(merged[1], weight * frames[1] + (1 - weight) * frames[2])


def test_of_the_last_two_frames_of_a_middle_the_first_stands_for_both() -> None:
    frames = turned(0, 10, 12, 5)
    merged, stands_for = merge_frames(frames)
    assert stands_for == [0, 1, 1, 2]
    assert torch.equal(merged[1], frames[1])


def test_the_last_frame_of_a_middle_is_not_lost() -> None:
    """The paper's code loses it, since its loop ends one frame early."""
    frames = scenes(5)
    frames[1:4] += 0.2 * scenes(1, 1, 1, seed=1)  # less similar to each other than the last frame to the first
    merged, stands_for = merge_frames(frames)
    assert torch.equal(merged, frames)
    assert stands_for == [0, 1, 2, 3, 4]


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), drift=st.floats(0, 0.3), seed=st.integers(0, 50))
def test_every_frame_has_one_that_stands_for_it_in_order(lengths: list[int], drift: float, seed: int) -> None:
    frames = scenes(*lengths, drift=drift, seed=seed)
    merged, stands_for = merge_frames(frames)
    assert stands_for[0] == 0
    assert stands_for[-1] == len(merged) - 1
    assert all(after - before in (0, 1) for before, after in pairwise(stands_for))
    for number in range(len(merged)):
        alone = [frame for frame, mine in zip(frames, stands_for, strict=True) if mine == number]
        if len(alone) == 1:
            assert torch.equal(merged[number], alone[0])


@given(num_tokens=st.integers(1, 40), ratio=st.floats(0.01, 1), lengths=st.lists(st.integers(1, 5), min_size=1))
def test_of_every_frame_about_the_share_stays(num_tokens: int, ratio: float, lengths: list[int]) -> None:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    stretches = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    attention = torch.rand(ends[-1], num_tokens, generator=torch.Generator().manual_seed(3))
    kept = choose(attention, stretches, ratio).sum(1)
    assert bool((kept >= 1).all())
    assert bool(((kept - ratio * num_tokens).abs() <= 1).all())


def test_a_frame_between_others_keeps_one_token_of_each_part_and_the_ends_those_of_most_attention() -> None:
    attention = torch.arange(16.0).repeat(3, 1)
    kept = choose(attention, [range(3)], 0.25)
    assert kept[0].nonzero()[:, 0].tolist() == [12, 13, 14, 15]
    assert kept[1].nonzero()[:, 0].tolist() == [3, 7, 11, 15]
    assert torch.equal(kept[2], kept[0])


def test_rounding_changes_neither_what_is_merged_nor_what_is_chosen() -> None:
    """Frames and attention are equal except for rounding by another summation order."""
    frames = scenes(8).double()
    noise = 1e-9 * torch.randn(frames.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert merge_frames(frames + noise)[1] == merge_frames(frames)[1] == [0, 1, 1, 2, 2, 3, 3, 4]
    attention = torch.ones(8, 64, dtype=torch.float64)
    noise = 1e-9 * torch.randn(attention.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(choose(attention + noise, [range(8)], 0.3), choose(attention, [range(8)], 0.3))
