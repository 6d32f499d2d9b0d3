"""Where two models have the same vision tower, what one makes of a video serves the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models.families.test_exactness import clip
from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_models.video_lm import VideoLM

pytestmark = pytest.mark.unit

TURNS = [Turn(role="user", parts=(VIDEO, "what?"))]
LONG = clip(3, num_frames=11)  # more than go through a tower at once


@pytest.fixture(scope="module", params=["llava_onevision", "llava_next_video", "internvl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def load(family: str, folder: Path) -> VideoLM:
    save(family, folder)
    return load_model(ModelSpec(role="target", path=str(folder), device="cpu", dtype="float32"))


def tower_of(model: VideoLM) -> Any:
    return model._model.model.vision_tower


def handed_on(model: VideoLM, video: Video) -> Video:
    """With what the model's tower makes of it."""
    model.hands_on_tower = True
    (rows,) = model.prepare(TURNS, [video]).tower
    model.hands_on_tower = False
    return replace(video, tower=rows)


def test_features_from_handed_on_rows_are_those_of_the_own_tower(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = model.encode(LONG)
    known = handed_on(model, LONG)
    monkeypatch.setattr(tower_of(model), "forward", None)  # it must not be asked
    given = model.encode(known)
    assert torch.equal(given.features, own.features)
    assert torch.equal(given.grid, own.grid)
    assert given.words == own.words
    assert given.tower_rows is None


def test_rows_come_with_a_prompt_only_where_somebody_takes_them_and_the_tower_has_just_run(model: VideoLM) -> None:
    video, cache = replace(LONG, key="k"), EncoderCache(2**20)
    assert model.prepare(TURNS, [video]).tower == ()
    model.hands_on_tower = True
    assert len(model.prepare(TURNS, [video], cache).tower) == 1
    assert model.prepare(TURNS, [video], cache).tower == ()
    model.hands_on_tower = False


def test_digests_are_equal_for_equal_towers_alone(model: VideoLM) -> None:
    before = model.tower_digest()
    assert before == model.tower_digest()
    assert before is not None
    weights = next(tower_of(model).parameters())
    with torch.inference_mode():
        weights[0] += 1.0
    assert model.tower_digest() != before
    with torch.inference_mode():
        weights[0] -= 1.0
    model._model.config.vision_feature_layer = -2
    assert model.tower_digest() != before
    model._model.config.vision_feature_layer = -1


def test_a_family_whose_rows_cannot_be_handed_on_has_no_digest(tmp_path: Path) -> None:
    assert load("qwen2_vl", tmp_path).tower_digest() is None


def test_the_bundled_draft_has_the_targets_tower() -> None:
    digests = [load_model(ModelSpec(path="bundled", role=role)).tower_digest() for role in ("target", "draft")]
    assert digests[0] == digests[1]
    assert digests[0] is not None
