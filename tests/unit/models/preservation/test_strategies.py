"""Properties of every strategy: budget, floor, always-kept rows, identity of `none`, determinism, unusual clips."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vidspec_models.preservation.selection import MIN_KEPT, CellSelector, Strategy, filled_evenly, num_kept
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.prompt import CLIP_GAP, NO_CELL, Prompt
from vidspec_models.request import Preservation

PRUNING = [name for name, strategy in STRATEGIES.items() if not strategy.ignores_ratio]
NAMES = st.sampled_from(list(STRATEGIES))
RATIOS = st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.9, 0.95, 0.99])


def kept_rows(
    strategy: Strategy,
    ratio: float,
    features: Tensor,
    grid: Tensor,
    relevance: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """The kept rows of a prompt that consists of these video rows."""
    prompt = Prompt(
        ids=(0,) * len(features),
        embeddings=features,
        rotary=(features, features),
        is_video=torch.ones(len(features), dtype=torch.bool),
        next_position=len(features),
        grid=grid,
    )
    return CellSelector(strategy, ratio, prompt, seed).kept(relevance)


def grid_of(num_frames: int, num_rows: int, num_columns: int, newline: bool = True) -> Tensor:
    places = torch.cartesian_prod(torch.arange(num_frames), torch.arange(num_rows), torch.arange(num_columns))
    return torch.cat((places, torch.full((1, 3), NO_CELL))) if newline else places


def line_of(num_cells: int) -> Tensor:
    """One frame with a single line of cells."""
    return grid_of(1, 1, num_cells, newline=False)


def features_of(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, 12, generator=torch.Generator().manual_seed(seed))


def relevance_of(num_rows: int, seed: int = 0) -> Tensor:
    return torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)) ** 4


@st.composite
def clips(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """Features, grid and relevance of clips with holes; with or without newline, equal features, and scores."""
    grid = grid_of(draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.booleans()))
    seed = draw(st.integers(0, 5))
    if draw(st.booleans()):
        stays = torch.rand(len(grid), generator=torch.Generator().manual_seed(seed)) < 0.7
        grid = grid[stays | (grid[:, 0] == NO_CELL)]
    features = features_of(len(grid), seed)
    if draw(st.booleans()):
        features = torch.ones_like(features)
    relevance = draw(st.sampled_from(["random", "none", "zero", "broken"]))
    scores = {"random": relevance_of(len(grid)), "zero": torch.zeros(len(grid)), "none": None}
    return features, grid, scores.get(relevance, torch.full((len(grid),), torch.nan))


@settings(max_examples=100, deadline=None)
@given(name=NAMES, ratio=RATIOS, clip=clips(), seed=st.integers(0, 2**64 - 1))
def test_every_strategy_keeps_its_budget_sorted_and_with_the_rows_that_are_no_cells(
    name: str, ratio: float, clip: tuple[Tensor, Tensor, Tensor | None], seed: int
) -> None:
    features, grid, relevance = clip
    kept = kept_rows(STRATEGIES[name], ratio, features, grid, relevance, seed)
    is_cell = (grid != NO_CELL).all(1)
    assert kept.dtype == torch.int64
    assert torch.equal(kept, kept.unique()), "sorted, no row twice"
    assert not len(kept) or int(kept[-1]) < len(grid)
    assert set((~is_cell).nonzero()[:, 0].tolist()) <= set(kept.tolist())
    budget = {"none": int(is_cell.sum()), "blind": 0}.get(name, num_kept(int(is_cell.sum()), ratio))
    assert int(is_cell[kept].sum()) == budget
    assert torch.equal(kept, kept_rows(STRATEGIES[name], ratio, features, grid, relevance, seed))


@settings(max_examples=60, deadline=None)
@given(
    num_frames=st.integers(1, 8),
    size=st.integers(1, 40),
    share=st.floats(0, 1),
    part=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_every_frame_keeps_its_floor(num_frames: int, size: int, share: float, part: float, seed: int) -> None:
    num_cells = num_frames * size
    budget = int(part * num_cells)
    num_even = int(share * budget)
    chosen = torch.randperm(num_cells, generator=torch.Generator().manual_seed(seed))[: budget - num_even]
    kept = filled_evenly(chosen, num_cells, budget)
    assert len(kept) == len(kept.unique()) == budget
    assert set(chosen.tolist()) <= set(kept.tolist())
    num_left = num_cells - len(chosen)
    if num_even > 1:
        floor = size // max(1, -(-(num_left - 1) // (num_even - 1)))
        assert (torch.bincount(kept // size, minlength=num_frames) >= floor).all()


@pytest.mark.parametrize("name", PRUNING)
@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 2, 4), (1, 1, 1)])
def test_a_clip_too_short_to_prune_is_kept_whole(name: str, shape: tuple[int, int, int]) -> None:
    grid = grid_of(*shape)
    assert len(grid) - 1 <= MIN_KEPT
    kept = kept_rows(STRATEGIES[name], 0.99, features_of(len(grid)), grid, relevance_of(len(grid)))
    assert kept.tolist() == list(range(len(grid)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_video_is_nothing_to_keep(name: str) -> None:
    nothing = torch.zeros(0, 3, dtype=torch.long)
    assert kept_rows(STRATEGIES[name], 0.9, torch.zeros(0, 12), nothing).tolist() == []


@pytest.mark.parametrize("name", PRUNING)
def test_a_frame_that_is_one_line_is_pruned_as_any_other(name: str) -> None:
    kept = kept_rows(STRATEGIES[name], 0.9, features_of(400), line_of(400), relevance_of(400))
    assert len(kept) == 40


@pytest.mark.parametrize("name", PRUNING)
def test_a_high_picture_beside_a_wide_one_is_pruned_without_a_place_for_all_that_neither_has(name: str) -> None:
    """A dense grid around both would have more places than there are addresses."""
    wide = torch.tensor([(0, 0, column) for column in [*range(199), 10**8]])
    high = wide[:, [0, 2, 1]] + torch.tensor([1 + CLIP_GAP, 0, 0])
    assert len(kept_rows(STRATEGIES[name], 0.9, features_of(400), torch.cat((wide, high)))) == 40


@pytest.mark.parametrize("name", PRUNING)
def test_identical_frames_and_one_frame_are_pruned_to_the_budget(name: str) -> None:
    one = features_of(64)
    for num_frames in (1, 8):
        grid = grid_of(num_frames, 8, 8, newline=False)
        assert len(kept_rows(STRATEGIES[name], 0.75, one.repeat(num_frames, 1), grid)) == 16 * num_frames


def test_random_depends_on_its_seed_alone() -> None:
    grid, strategy = grid_of(8, 8, 8), STRATEGIES["random"]
    first, again, other = (
        kept_rows(strategy, 0.9, features_of(513, number), grid, seed=seed) for number, seed in [(0, 1), (1, 1), (0, 2)]
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_strategy_can_be_asked_for() -> None:
    assert [choice.value for choice in Preservation] == list(STRATEGIES)


def test_specvlm_takes_the_fewest_rows_that_hold_its_share_and_spreads_the_rest() -> None:
    relevance = torch.full((100,), 0.001)
    relevance[[17, 40]] = 10.0
    kept = kept_rows(STRATEGIES["specvlm"], 0.8, features_of(100), line_of(100), relevance).tolist()
    # One of the two cells holds half of the attention, more than 0.4: the other 19 are evenly spaced, ends included.
    assert {0, 17, 99} <= set(kept)
    assert max(b - a for a, b in pairwise(kept)) <= 6


def test_attention_takes_the_largest_as_they_are() -> None:
    relevance = relevance_of(100)
    kept = kept_rows(STRATEGIES["attention"], 0.8, features_of(100), line_of(100), relevance)
    assert set(kept.tolist()) == set(relevance.topk(20).indices.tolist())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_attention_that_is_no_amount_is_none(broken: float) -> None:
    relevance = relevance_of(100)
    relevance[[3, 60]] = broken
    kept = kept_rows(STRATEGIES["attention"], 0.8, features_of(100), line_of(100), relevance)
    relevance[[3, 60]] = 0.0
    assert set(kept.tolist()) == set(relevance.topk(20).indices.tolist())


def test_merging_in_time_begins_anew_with_each_video() -> None:
    first, second = grid_of(3, 4, 4, newline=False), grid_of(5, 4, 4, newline=False)
    second[:, 0] += 3 + CLIP_GAP
    kept = kept_rows(STRATEGIES["ttm"], 1 - 48 / 128, features_of(16).repeat(8, 1), torch.cat((first, second)))
    assert kept.tolist() == [*range(16), *range(48, 64), *range(112, 128)]


def test_merging_in_time_keeps_window_starts_and_what_changes() -> None:
    grid = grid_of(8, 4, 4, newline=False)
    features = features_of(16).repeat(8, 1)
    changed = [16 * 3 + 5, 16 * 7 + 2]  # frame 3, place 5; frame 7, place 2
    features[changed] += 10 * features_of(2, seed=1)
    kept = kept_rows(STRATEGIES["ttm"], 1 - 34 / 128, features, grid)
    assert kept.tolist() == sorted([*range(16), *range(64, 80), *changed])


def test_merging_in_time_shows_the_whole_clip_where_even_its_window_starts_are_too_many() -> None:
    grid = grid_of(8, 4, 4, newline=False)
    assert kept_rows(STRATEGIES["ttm"], 1 - 16 / 128, features_of(128), grid)[[0, -1]].tolist() == [0, 79]


def test_hippo_keeps_what_stands_out_and_what_is_asked_for() -> None:
    grid = grid_of(4, 8, 8, newline=False)
    features = features_of(1).repeat(256, 1)
    thing = [64 * 2 + 27, 64 * 2 + 28]  # two cells that appear in the third frame
    features[thing] += 5 * features_of(2, seed=3)
    hippo = STRATEGIES["hippo"]
    assert set(thing) <= set(kept_rows(hippo, 0.9, features, grid).tolist())
    relevance = torch.full((256,), 0.01)
    relevance[[64 * 1 + 9, 64 * 3 + 50]] = 1.0
    kept = set(kept_rows(hippo, 0.9, features, grid, relevance).tolist())
    assert {*thing, 64 * 1 + 9, 64 * 3 + 50} <= kept


def test_hippo_does_not_spend_its_budget_on_what_repeats_itself() -> None:
    """Of a relevant frame shown eight times, no place is kept in nearly all frames, so that more places are kept."""
    grid = grid_of(8, 8, 8, newline=False)
    features = features_of(64).repeat(8, 1)
    relevance = relevance_of(64).repeat(8)
    times = {
        name: (kept_rows(STRATEGIES[name], 0.9, features, grid, relevance) % 64).unique(return_counts=True)[1]
        for name in ("hippo", "attention")
    }
    assert len(times["attention"]) == 7
    assert times["attention"].max() == 8
    assert len(times["hippo"]) > 2 * len(times["attention"])
    assert times["hippo"].max() <= 5


def test_hippo_leaves_no_half_of_a_clip_without_a_cell_however_the_attention_lies() -> None:
    grid = grid_of(8, 8, 8, newline=False)
    relevance = torch.zeros(512)
    relevance[:64] = 1.0  # all attention on the first frame
    kept = kept_rows(STRATEGIES["hippo"], 0.9, features_of(512), grid, relevance)
    frames = grid[kept][:, 0]
    assert int((frames == 0).sum()) > 30
    assert {0, 7} <= set(frames.tolist())
