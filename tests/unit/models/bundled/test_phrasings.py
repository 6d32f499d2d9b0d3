"""Phrasings: many, in both spellings, and none of those held out is trained on."""

from __future__ import annotations

import pytest

from vidspec_models.bundled.phrasings import HELD_OUT, KINDS, phrasings


@pytest.mark.parametrize("kind", KINDS)
def test_enough_phrasings_are_held_out_and_left_for_training(kind: str) -> None:
    trained, held_out = phrasings(kind, held_out=False), phrasings(kind, held_out=True)
    assert len(held_out) == HELD_OUT
    assert len(trained) >= HELD_OUT
    assert not set(trained) & set(held_out)


def test_spelling_is_british_and_american_and_fields_keep_their_names() -> None:
    every = phrasings("is_colour", held_out=False)
    assert any(" color of" in text for text in every)
    assert any(" colour of" in text for text in every)
    assert all("{colour}" in text for text in every)
