"""Scenes: splits are disjoint, objects neither jump nor overlap, every letter is visible."""

from __future__ import annotations

import numpy as np

from vidspec_models.bundled.render import slot_times
from vidspec_models.bundled.scene import TEST_SEEDS, TRAIN_SEEDS, sample_scene


def test_different_seeds_give_different_scenes() -> None:
    scenes = {repr(sample_scene(seed)).split(",", 1)[1] for seed in range(200)}
    assert len(scenes) == 200


def test_splits_share_no_seed() -> None:
    assert TEST_SEEDS.stop <= TRAIN_SEEDS.start
    assert TEST_SEEDS.start == 0


def test_moving_things_never_jump() -> None:
    times = (np.arange(256) + 0.5) / 256
    for seed in range(50):
        for thing in sample_scene(seed).things:
            path = np.array([thing.centre_at(t) for t in times if thing.is_visible(t)])
            assert np.abs(np.diff(path, axis=0)).max() <= 8


def test_things_never_cover_each_other() -> None:
    for seed in range(100):
        scene = sample_scene(seed)
        for time in slot_times():
            shown = [(thing.centre_at(time), thing.radius) for thing in scene.things if thing.is_visible(time)]
            for index, (a, radius_a) in enumerate(shown):
                for b, radius_b in shown[:index]:
                    assert np.hypot(a[0] - b[0], a[1] - b[1]) >= radius_a + radius_b


def test_every_letter_is_seen_by_the_canonical_sampling() -> None:
    for seed in range(200):
        for sign in sample_scene(seed).signs:
            assert 1 <= sum(sign.is_visible(time) for time in slot_times()) <= 2
