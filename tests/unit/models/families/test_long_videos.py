"""Videos encoded in parts, and token selection: the rows of the whole video, and videos larger than the context."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.unit.models.families import tiny_checkpoints
from tests.unit.models.families.test_exactness import SIZES, clip
from tests.unit.models.families.tiny_checkpoints import FAMILIES, load
from vidspec_models.compression import DyCoke
from vidspec_models.compression.frame_budgets import vidcom2
from vidspec_models.compression.token_selector import TokenSelector, token_selector
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import Cancelled, ContextOverflow
from vidspec_models.families import qwen_vl
from vidspec_models.prompt import Prompt
from vidspec_models.request import VIDEO, Compression, Turn, Video
from vidspec_models.video_lm import VideoHandling, VideoLM

pytestmark = pytest.mark.unit

TURNS = [Turn(role="user", parts=(VIDEO, "what?"))]
QWEN = [family for family in FAMILIES if family.startswith("qwen")]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=QWEN)
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    """A model that accepts large frames: a few of them exceed the context with few words."""
    with pytest.MonkeyPatch.context() as patch:
        for size in (tiny_checkpoints._SMALL, tiny_checkpoints._SMALL_VIDEO):
            patch.setitem(size, "longest_edge", 64 * 320 * 320)
        return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_vl, "_FRAMES_AT_ONCE", 4)


def selector(ratio: float) -> TokenSelector:
    return TokenSelector(method="vidcom2", ratio=ratio, select=partial(vidcom2, ratio=ratio))


def chosen(ratio: float) -> VideoHandling:
    return VideoHandling(selector=selector(ratio))


def places_of(part: Prompt, whole: Prompt) -> torch.Tensor:
    """Indices in the whole prompt of the part's rows: its text and the remaining video cells."""
    left = {tuple(cell) for cell in part.grid.tolist()}
    stays = torch.ones(whole.num_tokens, dtype=torch.bool)
    stays[whole.is_video] = torch.tensor([tuple(cell) in left for cell in whole.grid.tolist()])
    return stays


def test_a_prompt_that_was_chosen_from_is_a_part_of_the_whole(model: VideoLM) -> None:
    turns = [Turn(role="user", parts=(VIDEO, "this,", VIDEO, "beside", VIDEO, "or that?"))]
    videos = [clip(1, 6), clip(3, 1), clip(2, 3, SIZES[1])]  # the picture stays whole
    whole, part = model.prepare(turns, videos), model.prepare(turns, videos, handling=chosen(0.4))
    assert part.num_video_tokens < 0.7 * whole.num_video_tokens
    stays = places_of(part, whole)
    assert part.ids == tuple(token for token, is_left in zip(whole.ids, stays.tolist(), strict=True) if is_left)
    assert torch.equal(part.embeddings, whole.embeddings[stays])
    assert torch.equal(part.rotary[0], whole.rotary[0][stays])
    assert torch.equal(part.rotary[1], whole.rotary[1][stays])
    assert torch.equal(part.is_video, whole.is_video[stays])
    assert torch.equal(part.grid, whole.grid[stays[whole.is_video]])
    assert part.next_position == whole.next_position
    assert (part.deepstack is None) is (whole.deepstack is None)
    if part.deepstack is not None and whole.deepstack is not None:
        assert torch.equal(part.deepstack, whole.deepstack[:, stays])


@pytest.mark.parametrize("num_frames", [1, 5, 7, 12])
def test_a_video_that_goes_through_the_tower_in_parts_has_the_rows_of_the_whole(
    qwen: VideoLM, num_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = clip(3, num_frames, (200, 120))  # so large that the limit for a video shrinks its frames
    whole, encoded = qwen.prepare(TURNS, [video]), qwen.encode(video)
    monkeypatch.setattr(qwen_vl, "_FRAMES_AT_ONCE", 4)
    parts, again = qwen.prepare(TURNS, [video]), qwen.encode(video)
    assert parts.ids == whole.ids
    assert torch.allclose(parts.embeddings, whole.embeddings, atol=1e-4)
    assert torch.equal(parts.grid, whole.grid)
    for ours, theirs in zip(parts.rotary, whole.rotary, strict=True):
        assert torch.equal(ours, theirs)
    assert (parts.deepstack is None) is (whole.deepstack is None)
    if parts.deepstack is not None and whole.deepstack is not None:
        assert torch.allclose(parts.deepstack, whole.deepstack, atol=1e-4)
    assert parts.next_position == whole.next_position
    assert (again.placeholder_text, again.seconds_per_patch) == (encoded.placeholder_text, encoded.seconds_per_patch)
    assert again.patches is not None
    assert encoded.patches is not None
    assert again.patches.tolist() == encoded.patches.tolist()


@pytest.mark.usefixtures("in_parts")
def test_more_video_than_fits_fits_where_few_of_its_rows_stay(qwen: VideoLM) -> None:
    video, context = clip(4, 30, (320, 320)), qwen.context_length
    num_tokens = qwen.family.num_video_tokens(video)
    assert num_tokens > 1.2 * context
    with pytest.raises(ContextOverflow, match="compression_ratio of at most") as refused:
        qwen.prepare(TURNS, [video])
    ratio = float(re.findall(r"at most (0\.\d+)", str(refused.value))[0])
    for asked in (ratio, 0.05):
        prompt = qwen.prepare(TURNS, [video], handling=chosen(asked))
        assert prompt.num_tokens < context
        assert len(prompt.grid[:, 0].unique()) == 15, "some of every pair of frames"
        assert prompt.video_shapes[0][0] == 15
    with pytest.raises(ContextOverflow, match=f"vidcom2 keeps .* at most {ratio}"):
        qwen.prepare(TURNS, [video], handling=chosen(ratio + 0.1))


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("qwen", ["qwen3_vl"], indirect=True)
def test_where_words_and_cells_reach_beyond_the_context_fewer_frames_are_the_remedy(qwen: VideoLM) -> None:
    """Choosing fewer cells would not help: with as many frames, positions reach as far."""
    with pytest.raises(ContextOverflow, match=r"the prompt reaches position \d+, .* ask for fewer frames"):
        qwen.prepare(TURNS, [clip(4, 36, (280, 280))], handling=chosen(0.02))


@pytest.mark.usefixtures("in_parts")
def test_what_was_chosen_of_it_is_known_again_for_the_same_choice_only(qwen: VideoLM) -> None:
    video, cache = replace(clip(4, 30, (320, 320)), key="k"), EncoderCache(2**24)
    first, other = (qwen.prepare(TURNS, [video], cache, handling=chosen(ratio)) for ratio in (0.05, 0.1))
    assert other.num_video_tokens > 1.5 * first.num_video_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen.family, "encode_parts", None)  # not needed again
        again = qwen.prepare(TURNS, [video], cache, handling=chosen(0.05))
        with pytest.raises(TypeError):  # what was left out is not kept: a video so long may not be held as a whole
            qwen.prepare(TURNS, [video], cache, handling=chosen(0.07))
    assert torch.equal(first.embeddings, again.embeddings)
    assert first.identity is not None
    assert other.identity is not None
    common = first.identity.rows[: first.identity.num_common(other.identity)]
    assert (common >= 0).all(), "only words: other rows were chosen from each stretch"
    with pytest.raises(ContextOverflow):
        qwen.prepare(TURNS, [video], cache)


@pytest.mark.parametrize("compression", [Compression.V_CAST, Compression.VIDCOM2, Compression.DYCOKE])
@pytest.mark.parametrize("size", [(56, 84), (140, 112), (280, 280)])
def test_a_method_leaves_at_least_what_a_video_is_refused_for(
    qwen: VideoLM, compression: Compression, size: tuple[int, int]
) -> None:
    """Also if it rounds down in every pair of frames, or in all pairs but a dissimilar one."""
    video = clip(4, 24, size)
    num_pairs, num_rows, num_columns = qwen.encode(video).shape
    features = torch.randn(num_pairs, num_rows * num_columns, 8, generator=torch.Generator().manual_seed(0))
    features[1:] = features[1] + 0.05 * features[1:]
    num_cells = num_pairs * num_rows * num_columns
    for percent in range(1, 51):
        selector = token_selector(compression, percent / 100, DyCoke())
        assert selector is not None
        assert selector.select is not None
        left_out = qwen.family.num_video_tokens(video) - qwen._num_kept_rows([video], selector.ratio)
        assert int(selector.select(features).sum()) >= num_cells - left_out, percent


@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_what_choosing_cannot_shorten_is_refused_before_a_tower_runs(qwen: VideoLM, ratio: float) -> None:
    pictures = [clip(seed, 1, (320, 320)) for seed in range(9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen.family, "encode_parts", None)
        with pytest.raises(ContextOverflow, match=r"ask for fewer frames: about \d+ fit$"):
            qwen.prepare([Turn(role="user", parts=(VIDEO,) * 9)], pictures, handling=chosen(ratio))


@pytest.mark.parametrize("qwen", ["qwen3_vl"], indirect=True)
def test_a_ratio_that_would_fit_is_found_without_sizing_the_frames_for_every_ratio(
    qwen: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios, rows_left = [], qwen.family.num_kept_rows

    def counted(video: Video, ratio: float) -> int:
        ratios.append(ratio)
        return rows_left(video, ratio)

    monkeypatch.setattr(qwen.family, "num_kept_rows", counted)
    with pytest.raises(ContextOverflow, match=r"compression_ratio of at most 0\.\d"):
        qwen.prepare(TURNS, [clip(4, 30, (320, 320))])
    assert len(ratios) < 10


def test_what_a_server_has_no_room_for_is_refused_before_a_tower_runs(model: VideoLM) -> None:
    video = clip(2, 8)
    num_tokens = model.family.num_video_tokens(video)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.family, "encode_parts", None)
        with pytest.raises(
            ContextOverflow, match=f"8 frames take {num_tokens} tokens, but the context is {num_tokens}"
        ):
            model.prepare(TURNS, [video], handling=VideoHandling(context_length=num_tokens))
    model.prepare(TURNS, [video], handling=VideoHandling(context_length=num_tokens + 1))


def test_a_video_that_is_not_wanted_any_more_is_left_after_the_part_at_work(model: VideoLM) -> None:
    runs, inner = list[object](), model.family.model.model
    tower = inner.visual if hasattr(inner, "visual") else inner.vision_tower
    hook = tower.register_forward_pre_hook(lambda _, given: runs.append(given))
    try:
        with pytest.raises(Cancelled):
            model.encode(clip(4, 100), selector(0.05), lambda: len(runs) >= 3)
    finally:
        hook.remove()
    assert len(runs) == 3


def test_what_a_tower_has_made_of_all_of_a_video_is_kept_though_nobody_waits(model: VideoLM) -> None:
    """A client that gave up and asks again does not start from scratch."""
    video, cache = replace(clip(2, 8), key="k"), EncoderCache(2**24)
    model.prepare(TURNS, [video], cache, handling=VideoHandling(is_cancelled=lambda: True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.family, "encode_parts", None)
        model.prepare(TURNS, [video], cache)


def test_where_positions_count_all_rows_choosing_makes_no_room(tmp_path: Path) -> None:
    model = load("llava_onevision", tmp_path)
    with pytest.raises(ContextOverflow, match=r"not counting text and answer, ask for fewer frames: about \d+ fit$"):
        model.prepare(TURNS, [clip(4, 1100)], handling=chosen(0.05))
