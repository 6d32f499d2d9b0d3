"""Compressed prompts: parts of the prompt in its order, each video by itself, as much of it as was asked for."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.models.compression.prompts import video_prompt
from vidspec_models.compression import DyCoke
from vidspec_models.compression.compress_prompt import Choose, chooser, compress_prompt
from vidspec_models.compression.merging import merge_frames
from vidspec_models.request import Compression

RATIOS = st.one_of(st.sampled_from((0.0, 0.3, 0.5, 0.7)), st.floats(0, 0.99))
LOSSY = [Compression.V_CAST, Compression.VIDCOM2, Compression.DYCOKE]


def merging(ratio: float) -> Choose:
    return partial(merge_frames, merge_ratio=ratio)


@given(num_frames=st.integers(1, 9), ratio=RATIOS, has_newline=st.booleans())
def test_a_merged_prompt_is_a_part_of_the_prompt_in_its_order(num_frames: int, ratio: float, has_newline: bool) -> None:
    prompt = video_prompt(num_frames, 2, 3, has_newline=has_newline)
    merged = compress_prompt(prompt, merging(ratio))
    places = [prompt.ids.index(token) for token in merged.ids]
    assert places == sorted(places)
    assert set(range(prompt.num_tokens)) - set(places) <= set(prompt.is_video.nonzero()[:, 0].tolist())
    assert torch.equal(merged.embeddings, prompt.embeddings[places])
    assert torch.equal(merged.rotary[0], prompt.rotary[0][places])
    assert torch.equal(merged.rotary[1], prompt.rotary[1][places])
    assert torch.equal(merged.is_video, prompt.is_video[places])
    assert merged.next_position == prompt.next_position
    video_places = [int(prompt.is_video[:place].sum()) for place in places if prompt.is_video[place]]
    assert torch.equal(merged.grid, prompt.grid[video_places])
    assert merged.layer_additions is not None
    assert prompt.layer_additions is not None
    assert torch.equal(merged.layer_additions, prompt.layer_additions[:, places])
    assert has_newline is bool((merged.grid == -1).any())


def test_ratio_zero_and_a_prompt_without_video_change_nothing() -> None:
    prompt = video_prompt(5, 2, 2)
    assert compress_prompt(prompt, merging(0.0)) is prompt
    text = dataclasses.replace(prompt, grid=prompt.grid[:0], is_video=torch.zeros_like(prompt.is_video))
    assert compress_prompt(text, merging(0.5)) is text


@pytest.mark.parametrize("compression", LOSSY)
def test_one_frame_stays_whole(compression: Compression) -> None:
    prompt = video_prompt(1, 2, 2, then=(1, 3, 3))
    choose = chooser(compression, 0.1, DyCoke())
    assert choose is not None
    assert compress_prompt(prompt, choose) is prompt


@pytest.mark.parametrize("compression", LOSSY)
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_ratio_is_the_share_of_each_video_that_stays(compression: Compression, ratio: float) -> None:
    choose = chooser(compression, ratio, DyCoke(merge_ratio=0.1))
    assert choose is not None
    grid = compress_prompt(video_prompt(8, 10, 10, then=(4, 5, 5)), choose).grid
    sizes = (800, 100)
    counts = [int((grid[:, 0] < 8).sum()), int((grid[:, 0] >= 8).sum())]
    assert counts == pytest.approx([ratio * size for size in sizes], rel=0.06)


def test_without_a_ratio_each_method_has_its_own() -> None:
    prompt = video_prompt(8, 10, 10)
    shares = []
    for compression in LOSSY:
        choose = chooser(compression, None, DyCoke(merge_ratio=0.4))
        assert choose is not None
        shares.append(compress_prompt(prompt, choose).num_video_tokens / 800)
    assert shares == pytest.approx([0.25, 0.25, 1 - 0.75 * 0.4], rel=0.06)
    assert chooser(Compression.NONE, None, DyCoke()) is None


@pytest.mark.parametrize(("columns", "counts"), [(3, [4, 2, 6, 3, 3]), (2, [4, 2, 4, 2, 2])])
def test_another_video_begins_a_new_window_whatever_its_size(columns: int, counts: list[int]) -> None:
    merged = compress_prompt(video_prompt(2, 2, 2, then=(3, 2, columns)), merging(0.5))
    assert merged.grid[:, 0].unique_consecutive(return_counts=True)[1].tolist() == counts
