"""The tokens chosen from a video: in order, as many as requested, from the whole video or part by part."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.models.compression.prompts import WIDTH, cells
from vidspec_models.compression import DyCoke
from vidspec_models.compression.dycoke import temporal_token_merging
from vidspec_models.compression.frame_budgets import vidcom2
from vidspec_models.compression.token_selector import TokenSelector, token_selector
from vidspec_models.encoder_cache import EncodedVideo, concatenated
from vidspec_models.prompt import NO_CELL
from vidspec_models.request import Compression

RATIOS = st.one_of(st.sampled_from((0.0, 0.3, 0.5, 0.7)), st.floats(0, 0.99))
LOSSY = [Compression.V_CAST, Compression.VIDCOM2, Compression.DYCOKE]


def merging(ratio: float) -> TokenSelector:
    select = partial(temporal_token_merging, merge_ratio=ratio)
    return TokenSelector(method="ttm", ratio=1 - 0.75 * ratio, select=select)


def chosen_by(compression: Compression, ratio: float | None, dycoke: DyCoke) -> TokenSelector:
    selector = token_selector(compression, ratio, dycoke)
    assert selector is not None
    return selector


def encoded(num_frames: int, num_rows: int, num_columns: int, *, has_newline: bool = False) -> EncodedVideo:
    grid = cells(0, num_frames, num_rows, num_columns)
    if has_newline:
        grid = torch.cat((grid, torch.full((1, 3), NO_CELL)))
    rows = torch.randn(2, len(grid), WIDTH, generator=torch.Generator().manual_seed(len(grid)))
    return EncodedVideo(
        placeholder_text="v" * len(grid),
        features=rows[0],
        shape=(num_frames, num_rows, num_columns),
        grid=grid,
        deepstack=(rows[1],),
        patches=torch.tensor([[num_frames, 2 * num_rows, 2 * num_columns]]),
        key="k",
    )


def split(video: EncodedVideo, num_frames: int) -> list[EncodedVideo]:
    """The parts given by a tower that encodes `num_frames` at a time."""
    rows, found = len(video.features) // video.num_frames, []
    assert video.patches is not None
    for first in range(0, video.num_frames, num_frames):
        part = slice(first * rows, (first + num_frames) * rows)
        grid = video.grid[part] - torch.tensor((first, 0, 0))
        count = int(grid[:, 0].max()) + 1
        found.append(
            EncodedVideo(
                placeholder_text=video.placeholder_text[part],
                features=video.features[part],
                shape=(count, *video.shape[1:]),
                grid=grid,
                deepstack=(video.deepstack[0][part],),
                patches=torch.cat((torch.tensor([[count]]), video.patches[:, 1:]), 1),
                key="k",
            )
        )
    return found


def same(first: EncodedVideo, second: EncodedVideo) -> bool:
    stays = (first.kept_mask is None) is (second.kept_mask is None) and (
        first.kept_mask is None or second.kept_mask is None or torch.equal(first.kept_mask, second.kept_mask)
    )
    return (
        stays
        and (first.placeholder_text, first.key, first.shape) == (second.placeholder_text, second.key, second.shape)
        and torch.equal(first.features, second.features)
        and torch.equal(first.grid, second.grid)
        and torch.equal(first.deepstack[0], second.deepstack[0])
        and first.patches is not None
        and second.patches is not None
        and first.patches.tolist() == second.patches.tolist()
    )


@given(num_frames=st.integers(1, 9), ratio=RATIOS, has_newline=st.booleans())
def test_what_is_chosen_is_a_part_of_the_video_in_its_order(num_frames: int, ratio: float, has_newline: bool) -> None:
    video = encoded(num_frames, 2, 3, has_newline=has_newline)
    chosen = merging(ratio).apply(video)
    stays = torch.ones(len(video.features), dtype=torch.bool) if chosen.kept_mask is None else chosen.kept_mask
    assert torch.equal(chosen.features, video.features[stays])
    assert torch.equal(chosen.deepstack[0], video.deepstack[0][stays])
    assert torch.equal(chosen.grid, video.grid[stays])
    assert chosen.placeholder_text == video.placeholder_text
    assert has_newline is bool((chosen.grid == NO_CELL).any())


@given(num_frames=st.integers(1, 9), at_once=st.integers(1, 9))
def test_parts_make_the_whole(num_frames: int, at_once: int) -> None:
    video = encoded(num_frames, 2, 3)
    assert same(concatenated(split(video, at_once)), video)


@given(num_frames=st.integers(1, 12), at_once=st.integers(2, 4), most=st.integers(1, 80))
def test_of_a_video_in_stretches_each_is_chosen_from_by_itself(num_frames: int, at_once: int, most: int) -> None:
    video = encoded(num_frames, 2, 3)
    seen: list[int] = []

    def every_other(features: torch.Tensor) -> torch.Tensor:
        seen.append(features.shape[0])
        return (torch.arange(6) % 2 == 0).expand(features.shape[:2])

    selector = TokenSelector(method="half", ratio=0.5, select=every_other)
    chosen = selector.apply_in_parts(iter(split(video, at_once)), most)
    parts = [len(part.grid) // 6 for part in split(video, at_once)]
    ends = [sum(parts[:number]) for number in range(1, len(parts) + 1)]
    sizes = [stop - start for start, stop in pairwise([0, *_ends(ends, most // 6)])]
    assert seen == [size for size in sizes if num_frames > 1], "a video of a single frame stays whole"
    kept = torch.tensor([num_frames == 1 or place % 2 == 0 for _ in range(num_frames) for place in range(6)])
    assert same(chosen, video.only(kept))


def _ends(ends: list[int], most: int) -> list[int]:
    """The ends of stretches of at most `most` frames; a stretch may be one longer part, or get a single last frame."""
    found, last = [], 0
    for end, following in pairwise([*ends, None]):
        assert end is not None
        if following is None or (following - last > most and following - end > 1):
            found.append(end)
            last = end
    return found


def test_a_video_that_fits_has_the_same_rows_in_stretches_as_whole() -> None:
    video = encoded(8, 3, 3)
    selector = TokenSelector(method="vidcom2", ratio=0.4, select=partial(vidcom2, ratio=0.4))
    assert same(selector.apply_in_parts(iter(split(video, 3)), len(video.features)), selector.apply(video))


def test_ratio_zero_changes_nothing() -> None:
    video = encoded(5, 2, 2)
    assert merging(0.0).apply(video) is video


@pytest.mark.parametrize("compression", LOSSY)
def test_one_frame_stays_whole(compression: Compression) -> None:
    video = encoded(1, 3, 3)
    assert chosen_by(compression, 0.1, DyCoke()).apply(video) is video


@pytest.mark.parametrize("compression", LOSSY)
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_ratio_is_the_share_of_a_video_that_stays(compression: Compression, ratio: float) -> None:
    selector = chosen_by(compression, ratio, DyCoke(merge_ratio=0.1))
    assert selector.ratio == pytest.approx(ratio, abs=0.01)  # DyCoke keeps some of every frame
    counts = [len(selector.apply(video).features) for video in (encoded(8, 10, 10), encoded(4, 5, 5))]
    assert counts == pytest.approx([ratio * size for size in (800, 100)], rel=0.06)


@pytest.mark.parametrize("compression", LOSSY)
def test_a_share_of_one_leaves_every_video_as_it_is(compression: Compression) -> None:
    assert token_selector(compression, 1.0, DyCoke()) is None


def test_by_dycoke_little_less_than_a_quarter_of_a_video_can_be_chosen() -> None:
    selector, video = chosen_by(Compression.DYCOKE, 0.05, DyCoke()), encoded(8, 10, 10)
    assert selector.ratio == pytest.approx(0.2575)
    assert len(selector.apply(video).features) == 2 * 100 + 6 * 1


def test_without_a_ratio_each_method_has_its_own() -> None:
    video, dycoke = encoded(8, 10, 10), DyCoke(merge_ratio=0.4)
    selectors = [chosen_by(compression, None, dycoke) for compression in LOSSY]
    assert [selector.ratio for selector in selectors] == pytest.approx([0.25, 0.25, 1 - 0.75 * 0.4])
    shares = [len(selector.apply(video).features) / 800 for selector in selectors]
    assert shares == pytest.approx([0.25, 0.25, 1 - 0.75 * 0.4], rel=0.06)
    assert token_selector(Compression.NONE, None, dycoke) is None


def test_where_the_tower_chooses_nothing_is_chosen_afterwards() -> None:
    selector, video = chosen_by(Compression.EARLYTOM, 0.4, DyCoke()), encoded(8, 2, 2)
    assert (selector.ratio, selector.select) == (0.4, None)
    assert selector.apply(video) is video
    assert token_selector(Compression.EARLYTOM, 1.0, DyCoke()) is not None, "merging frames is its own"
