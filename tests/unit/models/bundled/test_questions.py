"""Questions: answers follow from the scene."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vidspec_models.bundled.plain_questions import PLAIN_KINDS, ask_plainly
from vidspec_models.bundled.questions import QUESTION_TYPES, ask, conclusion, questions
from vidspec_models.bundled.scene import CORNERS, NUMBERS, REGIONS, WINDOWS, Scene, sample_scene


def test_every_type_of_question_occurs_and_none_is_trivial() -> None:
    answers: dict[str, Counter[str]] = {kind: Counter() for kind in QUESTION_TYPES}
    for seed in range(600):
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


def test_the_conclusion_of_a_reply_is_what_follows_from_its_reason() -> None:
    rng = np.random.default_rng(2)
    for seed in range(30):
        for kind in PLAIN_KINDS:
            question = ask_plainly(sample_scene(seed), kind, rng)
            if question is not None:
                assert conclusion(question.reply) == question.answer
