"""What is measured: which facts a caption gets right."""

from __future__ import annotations

from vidspec_models.bundled import caption, sample_scene
from vidspec_models.training.evaluation import CaptionScore


def test_one_wrong_word_makes_a_caption_wrong() -> None:
    score = CaptionScore()
    scene = sample_scene(0)
    score.add(scene, caption(scene))
    assert score.all_right == 1.0
    score.add(scene, caption(scene).replace("three", "two"))
    assert score.all_right == 0.5
    assert score.fact_rates()["count"] == 0.5
