"""The conversations about a clip in training."""

from __future__ import annotations

import numpy as np

from vidspec_models.bundled.captions import parse_caption, scene_facts
from vidspec_models.bundled.description import parse_description
from vidspec_models.bundled.phrasings import UNKNOWN
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.training.conversations import draw_foreign, draw_long, draw_short


def test_long_answers_are_captions_or_descriptions_and_all_are_true() -> None:
    num_json = 0
    for seed in range(200):
        scene = sample_scene(seed)
        exchange = draw_long(scene, np.random.default_rng(seed))
        is_json = "json" in exchange.prompt.lower()
        said = parse_description(exchange.answer) if is_json else parse_caption(exchange.answer)
        assert said == scene_facts(scene)
        num_json += is_json
    assert 70 < num_json < 130


def test_without_a_video_nothing_is_known() -> None:
    rng = np.random.default_rng(0)
    exchanges = [exchange for _ in range(600) if (exchange := draw_short(sample_scene(3), rng)) is not None]
    assert {exchange.answer for exchange in exchanges if not exchange.sees_video} == {UNKNOWN}
    assert 0.02 < sum(exchange.answer == UNKNOWN for exchange in exchanges) / len(exchanges) < 0.15
    assert draw_foreign(rng).answer == UNKNOWN


def test_clips_of_another_kind_are_asked_about_as_ours_are() -> None:
    rng = np.random.default_rng(1)
    asked = [draw_foreign(rng, held_out=True) for _ in range(300)]
    assert {exchange.answer for exchange in asked} == {UNKNOWN}
    assert 20 < sum("colo" in exchange.prompt.lower() for exchange in asked) < 150
    assert sum(exchange.prompt.lower().startswith(("is ", "do ", "does ", "can ")) for exchange in asked) > 20
