"""If two models have the same vision tower, one model's features of a video serve the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models.families.test_exactness import clip
from tests.unit.models.families.tiny_checkpoints import load
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import DEFAULT_TEMPLATE, VIDEO, Turn, Video
from vidspec_models.video_lm import VideoHandling, VideoLM

pytestmark = pytest.mark.unit

TURNS = [Turn(role="user", parts=(VIDEO, "what?"))]
HANDED_ON = VideoHandling(returns_tower_output=True)
LONG = clip(3, num_frames=11)  # more frames than a tower takes at once


@pytest.fixture(scope="module", params=["llava_onevision", "llava_next_video", "internvl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def tower_of(model: VideoLM) -> Any:
    return model.family.model.model.vision_tower


def handed_on(model: VideoLM, video: Video) -> Video:
    """The video with the features of the model's tower."""
    (rows,) = model.prepare(TURNS, [video], None, DEFAULT_TEMPLATE, HANDED_ON).tower
    return replace(video, tower=rows)


def test_features_from_handed_on_rows_are_those_of_the_own_tower(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = model.encode(LONG)
    known = handed_on(model, LONG)
    monkeypatch.setattr(tower_of(model), "forward", None)  # the tower must not run
    given = model.encode(known)
    assert torch.equal(given.features, own.features)
    assert torch.equal(given.grid, own.grid)
    assert given.placeholder_text == own.placeholder_text


def test_rows_come_with_a_prompt_only_where_they_are_asked_for_and_the_tower_has_just_run(model: VideoLM) -> None:
    video, cache = replace(LONG, key="k"), EncoderCache(2**20)
    assert model.prepare(TURNS, [video]).tower == ()
    assert len(model.prepare(TURNS, [video], cache, DEFAULT_TEMPLATE, HANDED_ON).tower) == 1
    assert model.prepare(TURNS, [video], cache, DEFAULT_TEMPLATE, HANDED_ON).tower == ()
    both = [Turn(role="user", parts=(VIDEO, VIDEO, "what?"))]
    assert model.prepare(both, [video, clip(4)], cache, DEFAULT_TEMPLATE, HANDED_ON).tower == (), "one was known"


def test_digests_are_equal_for_equal_towers_alone(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model.family.tower_digest()
    assert before == model.family.tower_digest()
    assert before is not None
    weights = next(tower_of(model).parameters())
    kept = weights.clone()
    with torch.inference_mode():
        weights[0] += 1.0
        assert model.family.tower_digest() != before
        weights.copy_(kept)
    assert model.family.tower_digest() == before
    monkeypatch.setattr(model.family.model.config, "vision_feature_layer", 0)
    assert model.family.tower_digest() != before


def test_a_family_whose_rows_cannot_be_handed_on_has_no_digest(tmp_path: Path) -> None:
    assert load("qwen2_vl", tmp_path).family.tower_digest() is None


def test_the_bundled_draft_has_the_targets_tower_and_sees_the_same_by_either() -> None:
    target, draft = (load_model(ModelSpec(path="bundled", role=role)) for role in ("target", "draft"))
    assert target.family.tower_digest() == draft.family.tower_digest()
    assert target.family.tower_digest() is not None
    video = clip(5, num_frames=8, size=(240, 320))
    assert torch.equal(draft.encode(handed_on(target, video)).features, draft.encode(video).features)
