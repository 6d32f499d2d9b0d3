"""Captions: parsing a caption gives back the facts of its scene."""

from __future__ import annotations

import pytest

from vidspec_models.bundled.captions import caption, parse_caption, scene_facts
from vidspec_models.bundled.scene import sample_scene


def test_facts_come_back_from_every_caption() -> None:
    for seed in range(600):
        scene = sample_scene(seed)
        assert parse_caption(caption(scene)) == scene_facts(scene)
        assert parse_caption(caption(scene, by_attribute_share=1.0)) == scene_facts(scene)


def test_a_caption_is_the_same_every_time() -> None:
    assert [caption(sample_scene(seed)) for seed in range(20)] == [caption(sample_scene(seed)) for seed in range(20)]


@pytest.mark.parametrize(
    "text", ["", "A dog runs.", "A large red circle flies.", "The background is plain pink.", "There are nine objects."]
)
def test_foreign_text_states_no_facts(text: str) -> None:
    facts = parse_caption(text)
    assert facts is None or facts["background"] is None
