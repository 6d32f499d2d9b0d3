"""The evaluation: which facts of a caption are right."""

from __future__ import annotations

from collections import defaultdict

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.training.evaluation import judge_caption
from vidspec_models.training.plain_evaluation import Marks


def test_one_wrong_word_makes_a_caption_wrong() -> None:
    facts: Marks = defaultdict(list)
    scene = sample_scene(0)
    assert judge_caption(scene, caption(scene), facts)
    assert not judge_caption(scene, caption(scene).replace("three", "two"), facts)
    assert facts["count"] == [True, False]
    assert facts["background"] == [True, True]
    assert not judge_caption(scene, "Nobody knows.", facts)
    assert facts["parses"] == [True, True, False]
    assert len(facts["count"]) == 2  # a text that is no caption has no facts to judge
