"""Captions and questions: facts survive the way through the text, answers follow from the scene."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vidspec_models.bundled import caption, parse_caption, questions, sample_scene
from vidspec_models.bundled.attributes import CORNERS, NUMBERS, REGIONS, WINDOWS
from vidspec_models.bundled.caption_score import CaptionScore
from vidspec_models.bundled.captions import scene_facts
from vidspec_models.bundled.questions import QUESTION_TYPES, ask
from vidspec_models.bundled.scene import Scene

SEEDS = range(600)


def test_facts_come_back_from_every_caption() -> None:
    for seed in SEEDS:
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


def test_one_wrong_word_makes_a_caption_wrong() -> None:
    score = CaptionScore()
    scene = sample_scene(0)
    score.add(scene, caption(scene))
    assert score.all_right == 1.0
    score.add(scene, caption(scene).replace("three", "two"))
    assert score.all_right == 0.5
    assert score.fact_rates()["count"] == 0.5


def test_every_type_of_question_occurs_and_none_is_trivial() -> None:
    answers: dict[str, Counter[str]] = {kind: Counter() for kind in QUESTION_TYPES}
    for seed in SEEDS:
        for question in questions(sample_scene(seed)):
            answers[question.kind][question.answer] += 1
    for kind, counts in answers.items():
        assert sum(counts.values()) > 50, kind
        assert counts.most_common(1)[0][1] / sum(counts.values()) < 0.7, kind


def test_answers_follow_from_the_scene() -> None:
    for seed in range(200):
        scene = sample_scene(seed)
        for question in questions(scene):
            assert question.answer in _truths(scene, question.kind), (seed, question)


def _truths(scene: Scene, kind: str) -> set[str]:
    things, signs = scene.things, scene.signs
    return {
        "count": {NUMBERS[len(things)]},
        "colour": {thing.colour for thing in things},
        "shape": {thing.shape for thing in things},
        "size": {thing.size for thing in things},
        "start": {REGIONS[thing.start] for thing in things},
        "end": {REGIONS[thing.end] for thing in things},
        "direction": {thing.direction for thing in things},
        "timing": {thing.timing for thing in things},
        "change": {thing.new_colour or "unchanged" for thing in things},
        "first": {thing.shape for thing in things if thing.visible_from == 0},
        "background": {scene.background},
        "texture": {scene.texture},
        "letter": {sign.letter for sign in signs} | {"none"},
        "letter_corner": {CORNERS[sign.corner] for sign in signs},
        "letter_time": {WINDOWS[sign.window] for sign in signs},
        "letter_count": {NUMBERS[len(signs)]},
    }[kind]


def test_an_unknown_type_of_question_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown question type"):
        ask(sample_scene(0), "smell", np.random.default_rng(0))
