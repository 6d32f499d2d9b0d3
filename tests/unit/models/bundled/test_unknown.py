"""Objects unknown to the pair: held-out ones are never used in training."""

from __future__ import annotations

from vidspec_models.bundled.unknown import small_talk


def test_small_talk_is_split() -> None:
    trained, held_out = small_talk(held_out=False), small_talk(held_out=True)
    assert len(held_out) > 200
    assert not set(trained) & set(held_out)
