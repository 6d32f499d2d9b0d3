"""V-CAST and VidCom2: budgets add up and follow the papers' criteria; rounding noise does not change choices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression.frame_budgets import curvature, share_out, v_cast, vidcom2

METHODS = pytest.mark.parametrize("method", [v_cast, vidcom2])
Method = Callable[[Tensor, float], Tensor]


def features(num_frames: int, num_tokens: int, seed: int = 0, width: int = 12) -> Tensor:
    return torch.randn(num_frames, num_tokens, width, generator=torch.Generator().manual_seed(seed))


@given(
    weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=12),
    most=st.integers(1, 20),
    over=st.integers(0, 300),
)
def test_a_budget_is_shared_out_wholly_within_its_bounds(weights: list[float], most: int, over: int) -> None:
    budget = len(weights) + over
    counts = share_out(budget, weights, most)
    assert sum(counts) == min(budget, most * len(weights))
    assert all(1 <= count <= most for count in counts)
    for one, other in zip(range(len(weights)), range(1, len(weights)), strict=False):
        if weights[one] > weights[other]:
            assert counts[one] >= counts[other]


@METHODS
@given(num_frames=st.integers(2, 9), num_tokens=st.integers(1, 20), ratio=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_of_every_frame_something_stays(
    method: Method, num_frames: int, num_tokens: int, ratio: float, seed: int
) -> None:
    kept = method(features(num_frames, num_tokens, seed), ratio)
    assert kept.any(1).all()
    assert kept.shape == (num_frames, num_tokens)


@METHODS
def test_rounding_of_the_features_changes_nothing(method: Method) -> None:
    found = features(8, 40).double()
    noise = 1e-12 * torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(method(found, 0.25), method(found + noise, 0.25))


@METHODS
def test_what_stands_out_of_its_background_stays(method: Method) -> None:
    background, thing = functional.normalize(features(2, 1, seed=3)[:, 0], dim=-1)
    found = background + 0.01 * features(8, 25)
    for frame in range(8):
        found[frame, 2 * frame : 2 * frame + 2] = 2 * thing
    kept = method(found, 0.25)
    assert all(kept[frame, 2 * frame : 2 * frame + 2].all() for frame in range(8))


def test_a_path_is_curved_where_it_turns() -> None:
    straight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [2.0, 1.0], [2.0, 0.0]])
    assert curvature(straight).tolist() == pytest.approx([1, 0, 1, 2, 1])
    assert curvature(straight[:1]).tolist() == [1]
    assert curvature(straight[:2]).tolist() == [1, 1]


def test_v_cast_gives_a_frame_more_where_the_video_turns() -> None:
    found = features(1, 50, seed=5).repeat(9, 1, 1)
    step, other = features(2, 1, seed=6)[:, 0]
    for frame in range(9):
        found[frame] += 0.2 * frame * step if frame < 5 else 0.8 * step + 0.2 * (frame - 4) * other
    counts = v_cast(found, 0.4).sum(1)
    assert counts.sum() == round(0.4 * 450)
    assert counts[4] == counts[1:-1].max()
    assert counts[4] > counts[2]


def test_v_cast_keeps_the_longest_of_what_points_the_same_way() -> None:
    length = 1 + torch.rand(4, 20, 1, generator=torch.Generator().manual_seed(2))
    kept = v_cast(length * features(1, 1, seed=5), 0.25)
    for frame in range(4):
        count = int(kept[frame].sum())
        assert set(kept[frame].nonzero()[:, 0].tolist()) == set(length[frame, :, 0].topk(count).indices.tolist())


def test_vidcom2_gives_a_frame_more_that_is_unlike_the_others() -> None:
    found = features(1, 50, seed=5).repeat(9, 1, 1) + 0.01 * features(9, 50, seed=7)
    found[6] = features(1, 50, seed=8)[0]
    counts = vidcom2(found, 0.25).sum(1)
    assert counts[6] > counts[:6].max()
    assert counts[6] > counts[7:].max()
