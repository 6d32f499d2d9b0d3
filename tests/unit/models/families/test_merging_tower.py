"""A tower that merges frames: rows for every frame, fewer computed, and attention equal to transformers' maps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.models.families import tiny_checkpoints
from tests.unit.models.families.test_exactness import clip
from tests.unit.models.families.tiny_checkpoints import load
from vidspec_models.compression.token_selector import TokenSelector
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.errors import Cancelled, ModelError
from vidspec_models.families.base import run_video_processor
from vidspec_models.families.merging_tower import MergedFrames, merging, read_layers
from vidspec_models.request import DEFAULT_TEMPLATE, VIDEO, Turn, Video
from vidspec_models.video_lm import DEFAULT_HANDLING, VideoHandling, VideoLM

pytestmark = pytest.mark.unit

HANDED_ON = VideoHandling(returns_tower_output=True)
TURNS = [Turn(role="user", parts=(VIDEO, "what?"))]


def by_tower(ratio: float) -> TokenSelector:
    return TokenSelector(method="earlytom", ratio=ratio)


def merged(ratio: float) -> VideoHandling:
    return VideoHandling(selector=by_tower(ratio))


def load_deep(family: str, folder: Path) -> VideoLM:
    """A model whose tower has ten layers, so that frames are merged twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_checkpoints._CLIP, "num_hidden_layers", 10)
        return load(family, folder)


@pytest.fixture(scope="module", params=["llava_onevision", "llava_next_video"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load_deep(request.param, tmp_path_factory.mktemp(request.param))


def still(num_frames: int) -> Video:
    """A video that repeats one frame."""
    video = clip(5, num_frames)
    return replace(video, frames=np.repeat(video.frames[:1], num_frames, axis=0))


def pixels(model: VideoLM, video: Video) -> torch.Tensor:
    found: torch.Tensor = run_video_processor(model._processor, video, {})["pixel_values_videos"]
    return found


@torch.inference_mode()
def test_a_video_that_stands_still_has_the_features_of_the_plain_tower_from_fewer_frames(model: VideoLM) -> None:
    plain, found = model.encode(still(8)), model.encode(still(8), by_tower(1.0))
    assert found.kept_mask is not None
    assert torch.allclose(found.features, plain.features[found.kept_mask], atol=1e-4)
    assert torch.equal(found.grid, plain.grid[found.kept_mask])
    assert found.placeholder_text == plain.placeholder_text
    with merging(model.family.model, 8) as frames:
        model.family.features(pixels(model, still(8)))  # type: ignore[attr-defined]
    assert frames.num_computed == 4, "of eight five are left behind the first merging layer, of these four"


@torch.inference_mode()
def test_the_last_of_the_layers_makes_the_rows_that_are_read(model: VideoLM) -> None:
    inner, made = model.family.model, list[torch.Tensor]()
    hook = read_layers(inner)[-1].register_forward_hook(lambda _, _given, rows: made.append(rows))
    try:
        states = inner.model.vision_tower(pixels(model, clip(6, 1))[0], output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    assert torch.equal(made[0], states[inner.config.vision_feature_layer])


def test_a_class_token_is_no_place_of_a_frame() -> None:
    for before in ([], [9.0]):
        frames = MergedFrames(1)
        frames.merge(torch.ones(1, 4, 2))
        frames._attention = torch.tensor([[*before, 0.5, 1.0, 0.5, 2.0]])
        assert frames.chosen(0.5, 2).tolist() == [False, True, False, True]


@torch.inference_mode()
def test_attention_is_what_the_towers_own_maps_say(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, layers = model.family.model.model.vision_tower, read_layers(model.family.model)
    for layer in layers:
        if "forward" in vars(layer):  # kernels, which have no maps
            monkeypatch.delattr(layer, "forward")
    shown = pixels(model, clip(6, 1))[0]
    with merging(model.family.model, 1) as frames:
        tower(shown, output_hidden_states=True)
    tower.set_attn_implementation("eager")
    try:
        maps = tower(shown, output_attentions=True).attentions[len(layers) - 1]
    finally:
        tower.set_attn_implementation("sdpa")
    received = maps.mean((1, 2)) * maps.shape[-1]
    assert torch.allclose(frames._attention.float(), received, atol=1e-4)


def test_a_prompt_has_the_share_that_was_asked_for_and_all_of_its_text(model: VideoLM) -> None:
    video = clip(3, 11)  # more frames than the tower takes at once
    whole = model.prepare(TURNS, [video])
    prompt = model.prepare(TURNS, [video], handling=merged(0.5))
    assert abs(prompt.num_video_tokens - 0.5 * whole.num_video_tokens) <= len(video.frames) + 1
    assert prompt.next_position == whole.next_position
    assert prompt.num_tokens - prompt.num_video_tokens == whole.num_tokens - whole.num_video_tokens


def test_a_prompt_that_was_merged_serves_those_alone_that_are_merged_alike(model: VideoLM) -> None:
    video, cache = replace(clip(3, 8), key="k"), EncoderCache(2**24)
    plain, half, again, most = (
        model.prepare(TURNS, [video], cache, handling=handling).identity
        for handling in (DEFAULT_HANDLING, merged(0.5), merged(0.5), merged(0.6))
    )
    assert half is not None
    assert again is not None
    assert half.num_common(again) == len(half.rows)
    for other in (plain, most):
        assert other is not None
        assert (half.rows[: half.num_common(other)] >= 0).all(), "words alone"


def test_videos_of_different_lengths_and_an_image_beside_them_have_their_shares(model: VideoLM) -> None:
    shown = [clip(3, 8), clip(4, 1), clip(5, 17)]  # the last group of the last video is a single frame
    turns = [Turn(role="user", parts=(VIDEO, VIDEO, VIDEO, "which?"))]
    alone = [model.prepare(TURNS, [video], handling=merged(0.25)) for video in shown]
    together = model.prepare(turns, shown, handling=merged(0.25))
    assert together.num_video_tokens == sum(prompt.num_video_tokens for prompt in alone)
    rows = together.embeddings[together.is_video]
    assert torch.allclose(rows, torch.cat([prompt.embeddings[prompt.is_video] for prompt in alone]), atol=1e-5)


def test_of_a_video_that_stands_still_the_share_is_kept_of_the_frames_that_are_left(model: VideoLM) -> None:
    whole = model.encode(still(8)).grid
    kept = model.encode(still(8), by_tower(0.25)).kept_mask
    assert kept is not None
    num_cells = int((whole[:, 0] == 0).sum())
    of_frame = [int(kept[whole[:, 0] == number].sum()) for number in range(8)]
    assert sum(count > 0 for count in of_frame) == 4
    assert sum(of_frame) == 0.25 * 8 * num_cells


def test_an_image_stays_whole(model: VideoLM) -> None:
    image = clip(3, 1)
    assert model.prepare(TURNS, [image], handling=merged(0.1)).ids == model.prepare(TURNS, [image]).ids


def test_features_of_each_ratio_are_kept_apart_from_each_other_and_from_those_of_the_whole(model: VideoLM) -> None:
    video, cache = replace(clip(3, 8), key="k"), EncoderCache(2**24)
    handlings = (VideoHandling(), merged(0.5), merged(0.25))
    counts, again = (
        [model.prepare(TURNS, [video], cache, handling=each).num_video_tokens for each in handlings] for _ in range(2)
    )
    assert counts == again
    assert counts[0] > counts[1] > counts[2]


def test_rows_for_a_draft_are_of_all_frames_even_where_the_target_has_merged_some(model: VideoLM) -> None:
    (rows,) = model.prepare(TURNS, [still(8)], None, DEFAULT_TEMPLATE, replace(HANDED_ON, selector=by_tower(0.5))).tower
    (plain,) = model.prepare(TURNS, [still(8)], None, DEFAULT_TEMPLATE, HANDED_ON).tower
    assert rows.placeholder_text == plain.placeholder_text
    assert np.allclose(rows.rows, plain.rows, atol=1e-4)


def test_hooks_are_gone_afterwards(model: VideoLM) -> None:
    modules: list[Any] = [*read_layers(model.family.model), model.family.model.model.multi_modal_projector]

    def num_hooks() -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]

    model.encode(clip(3, 8))  # transformers adds its own hooks in the first forward
    before = num_hooks()
    model.encode(clip(3, 8), by_tower(0.5))
    assert num_hooks() == before


def test_a_video_that_is_not_wanted_any_more_is_left_after_the_frames_at_work(model: VideoLM) -> None:
    answers = iter((False, True))
    handling = replace(merged(0.5), is_cancelled=lambda: next(answers))
    with pytest.raises(Cancelled):
        model.prepare(TURNS, [clip(3, 30)], handling=handling)
    assert not list(answers), "it was asked between the parts"


def test_a_tower_that_is_not_known_says_so(tmp_path: Path) -> None:
    assert not load("internvl", tmp_path).family.can_merge_frames


def test_one_that_cannot_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vidcom2"):
        load("internvl", tmp_path).prepare(TURNS, [clip(3, 8)], handling=merged(0.5))


def test_one_whose_layers_are_read_together_cannot(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.family.can_merge_frames
    monkeypatch.setattr(model.family.model.config, "vision_feature_layer", [-2, -1])
    assert not model.family.can_merge_frames
