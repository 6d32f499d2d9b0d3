"""Temporal token merging: right windows, right order, any number of frames; only the named tokens are lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression import DyCoke
from vidspec_models.compression.dycoke import num_left, temporal_token_merging

RATIOS = st.one_of(st.sampled_from((0.0, 0.3, 0.5, 0.7)), st.floats(0, 0.99))
SIZES = st.tuples(st.integers(1, 13), st.integers(1, 9))  # frames, tokens of a frame


def features(num_frames: int, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_frames, num_tokens, 6, generator=torch.Generator().manual_seed(seed))


@given(size=SIZES, ratio=RATIOS)
def test_first_frames_of_windows_stay_whole_and_the_others_keep_their_share(
    size: tuple[int, int], ratio: float
) -> None:
    kept = temporal_token_merging(features(*size), ratio)
    for frame, tokens in enumerate(kept):
        expected = size[1] if frame % 4 == 0 else num_left(size[1], ratio)
        assert int(tokens.sum()) == expected


@given(size=SIZES, ratio=RATIOS, seed=st.integers(0, 99))
def test_what_stays_is_least_like_its_counterpart_and_its_frame(size: tuple[int, int], ratio: float, seed: int) -> None:
    found = features(*size, seed)
    kept = temporal_token_merging(found, ratio)
    for frame in range(size[0]):
        if back := (0, 1, 2, 1)[frame % 4]:
            alike = functional.cosine_similarity(found[frame], found[frame - back], dim=-1)
            alike += functional.cosine_similarity(found[frame], found[frame].mean(0)[None], dim=-1)
            alike = alike.round(decimals=5)  # smaller differences count as equal
            stays, goes = alike[kept[frame]], alike[~kept[frame]]
            assert not len(stays) or not len(goes) or stays.max() <= goes.min()


@given(size=SIZES, ratio=RATIOS, changed=st.integers(0, 12))
def test_a_frame_changes_nothing_outside_its_own_window(size: tuple[int, int], ratio: float, changed: int) -> None:
    before = features(*size)
    after = before.clone()
    changed %= size[0]
    after[changed] = torch.randn(size[1], 6, generator=torch.Generator().manual_seed(7))
    same = (temporal_token_merging(before, ratio) == temporal_token_merging(after, ratio)).all(1)
    assert all(same[frame] for frame in range(size[0]) if frame // 4 != changed // 4)


@given(size=SIZES, ratio=RATIOS)
def test_of_identical_tokens_the_first_places_stay(size: tuple[int, int], ratio: float) -> None:
    kept = temporal_token_merging(features(1, 1).expand(*size, -1), ratio)
    count = num_left(size[1], ratio)
    for frame in range(size[0]):
        assert kept[frame].tolist() == [frame % 4 == 0 or place < count for place in range(size[1])]


@given(size=SIZES, ratio=RATIOS)
def test_of_identical_frames_the_same_places_stay(size: tuple[int, int], ratio: float) -> None:
    kept = temporal_token_merging(features(1, size[1]).expand(size[0], -1, -1), ratio)
    compared = [kept[frame].tolist() for frame in range(size[0]) if frame % 4]
    assert all(each == compared[0] for each in compared)


def test_a_full_clip_keeps_what_the_paper_says() -> None:
    kept = temporal_token_merging(features(32, 196), 0.7)
    assert int(kept.sum()) == 8 * 196 + 24 * 58
    assert kept.float().mean() == pytest.approx(1 - 0.75 * 0.7, abs=0.01)


def test_places_that_changed_stay_and_repeated_ones_go() -> None:
    found = features(1, 1).repeat(4, 5, 1)
    found[2, 3] *= -1  # the third frame shows something new in place 3 ...
    found[3] = found[2]  # ... and the fourth repeats it
    kept = temporal_token_merging(found, 0.8)
    assert kept.tolist() == [[True] * 5, [True] + [False] * 4] + [[False] * 3 + [True, False]] * 2


def test_a_thing_that_stands_still_stays_before_the_background_does() -> None:
    background, thing = torch.tensor([1.0, 0.1, 0.0]), torch.tensor([0.2, -1.0, 0.3])
    found = background.repeat(4, 5, 1)
    found[:, 2] = thing
    kept = temporal_token_merging(found, 0.8)
    assert kept[1:].tolist() == [[False, False, True, False, False]] * 3


@pytest.mark.parametrize("wrong", [{"merge_ratio": 1.0}, {"merge_ratio": -0.1}, {"hide_ratio": 1.5}, {"layer": 0}])
def test_parameters_out_of_range_are_errors_that_name_them(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DyCoke(**wrong)  # type: ignore[arg-type]


def test_a_share_is_rounded_down_but_not_by_the_binary_representation() -> None:
    assert num_left(10, 0.9) == 1
    assert num_left(196, 0.7) == 58
    assert num_left(3, 0.99) == 0
