"""Phrasings: many, in both spellings; held-out ones are never used in training."""

from __future__ import annotations

import numpy as np
import pytest

from vidspec_models.bundled.phrasings import HELD_OUT, KINDS, phrasings, small_talk
from vidspec_models.bundled.questions import CAPTION_PROMPTS, QUESTION_TYPES, ask
from vidspec_models.bundled.scene import sample_scene


@pytest.mark.parametrize("kind", KINDS)
def test_enough_phrasings_are_held_out_and_left_for_training(kind: str) -> None:
    trained, held_out = phrasings(kind, held_out=False), phrasings(kind, held_out=True)
    assert HELD_OUT - 1 <= len(held_out) <= HELD_OUT
    assert len(trained) >= HELD_OUT
    assert not set(trained) & set(held_out)


def test_no_short_question_or_prompt_that_training_uses_is_held_out() -> None:
    rng = np.random.default_rng(0)
    scenes = [sample_scene(seed) for seed in range(300)]
    asked = {question.text for scene in scenes for kind in QUESTION_TYPES if (question := ask(scene, kind, rng))}
    fields = {"it": "the ring", "colour": "red", "what": "ring", "size": "small", "letter": "A", "texture": "dotted"}
    fields |= {"one": "ring", "other": "square"}
    held_out = {text.format(**fields) for kind in KINDS for text in phrasings(kind, held_out=True)}
    assert not held_out & {*asked, *CAPTION_PROMPTS}


def test_spelling_is_british_and_american_and_fields_keep_their_names() -> None:
    every = phrasings("is_colour", held_out=False)
    assert any(" color of" in text for text in every)
    assert any(" colour of" in text for text in every)
    assert all("{colour}" in text for text in every)


def test_small_talk_is_split() -> None:
    trained, held_out = small_talk(held_out=False), small_talk(held_out=True)
    assert len(held_out) > 200
    assert not set(trained) & set(held_out)
