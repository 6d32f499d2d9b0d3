"""Plain questions: answers follow from the scene and cannot be guessed."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from vidspec_models.bundled.phrasings import UNKNOWN
from vidspec_models.bundled.plain_questions import ABSENT_THINGS, PLAIN_KINDS, ask_plainly, ask_which_video
from vidspec_models.bundled.scene import Scene, sample_scene


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_every_kind_occurs_and_none_is_trivial(kind: str) -> None:
    answers = Counter[str]()
    for seed in range(300):
        question = ask_plainly(sample_scene(seed), kind, np.random.default_rng(seed))
        if question is not None:
            assert "{" not in question.text
            answers[question.answer] += 1
    assert answers.total() > 100
    assert answers.most_common(1)[0][1] / answers.total() < 0.7


def test_a_thing_is_there_if_the_scene_has_it() -> None:
    for seed in range(300):
        scene = sample_scene(seed)
        question = ask_plainly(scene, "presence", np.random.default_rng(seed))
        if question is not None:
            assert (question.answer == "yes") == _is_shown(scene, question.text), question


def test_who_asks_about_a_thing_that_is_not_there_is_told_so() -> None:
    num_unknown = 0
    for seed in range(300):
        scene = sample_scene(seed)
        question = ask_plainly(scene, "missing", np.random.default_rng(seed))
        assert question is not None
        named = set(re.findall("[a-z]+", question.text.lower()))
        assert named.isdisjoint(thing.shape for thing in scene.things)
        if question.answer == UNKNOWN:
            num_unknown += 1
            assert named & set(ABSENT_THINGS)
        else:
            assert question.answer.removeprefix("There is no ").removesuffix(".") in named
    assert 20 < num_unknown < 80


def _is_shown(scene: Scene, text: str) -> bool:
    named = set(re.findall("[a-z]+", text.lower()))
    for thing in scene.things:
        known = {thing.colour, thing.new_colour, thing.size, thing.shape, "object"}
        words = named & _NOUNS_AND_ADJECTIVES
        if words <= known:
            return True
    return False


_NOUNS_AND_ADJECTIVES = {
    *["red", "green", "blue", "yellow", "orange", "purple", "cyan", "pink", "small", "large", "object"],
    *["circle", "square", "triangle", "diamond", "cross", "ring"],
    *["dog", "cat", "person", "car", "tree", "house", "bird", "face", "boat", "plane", "star", "ball"],
}


def test_of_two_clips_only_the_named_one_shows_it() -> None:
    for seed in range(100):
        one, other = sample_scene(2 * seed), sample_scene(2 * seed + 1)
        question = ask_which_video(one, other, np.random.default_rng(seed))
        if question is not None and "letter" not in question.text:
            shown = [_is_shown(scene, question.text) for scene in (one, other)]
            assert shown == ([True, False] if question.answer == "first" else [False, True]), question
