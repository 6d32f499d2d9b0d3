"""Scenes and pixels: deterministic, splits apart, times continuous, nothing covers anything."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from vidspec_models.bundled import (
    NUM_SLOTS,
    TEST_SEEDS,
    TRAIN_SEEDS,
    VALIDATION_SEEDS,
    render,
    sample_scene,
    slot_times,
)
from vidspec_models.bundled.labels import find_cells
from vidspec_models.bundled.render import render_with_owners


def test_the_same_seed_gives_the_same_pixels() -> None:
    one, two = (render(sample_scene(42), slot_times()) for _ in range(2))
    assert one.shape == (NUM_SLOTS, 128, 128, 3)
    assert one.dtype == np.uint8
    assert np.array_equal(one, two)


def test_different_seeds_give_different_scenes() -> None:
    scenes = {repr(sample_scene(seed)).split(",", 1)[1] for seed in range(200)}
    assert len(scenes) == 200


def test_splits_share_no_seed() -> None:
    assert TEST_SEEDS.stop <= VALIDATION_SEEDS.start
    assert VALIDATION_SEEDS.stop <= TRAIN_SEEDS.start
    assert TEST_SEEDS.start == 0


def test_frames_depend_on_their_time_only() -> None:
    scene = sample_scene(3)
    many = render(scene, (np.arange(64) + 0.5) / 64)
    some = render(scene, (np.arange(64)[::9] + 0.5) / 64)
    assert np.array_equal(many[::9], some)


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


def test_larger_frames_are_the_same_pixels_repeated() -> None:
    scene = sample_scene(7)
    assert np.array_equal(render(scene, slot_times(), size=256)[:, ::2, ::2], render(scene, slot_times()))
    with pytest.raises(ValueError, match="multiple of 128"):
        render(scene, slot_times(), size=200)


def test_empty_rendering_differs_only_where_something_is() -> None:
    for seed in range(20):
        scene = sample_scene(seed)
        full, owners = render_with_owners(scene, slot_times())
        empty, nothing = render_with_owners(scene, slot_times(), empty=True)
        assert not nothing.any()
        assert np.array_equal(full[owners == 0], empty[owners == 0])


def test_strict_background_cells_keep_their_distance() -> None:
    for seed in range(20):
        _, owners = render_with_owners(sample_scene(seed), slot_times())
        cells = find_cells(owners)
        assert not (cells.is_strict_background & ~cells.is_clear).any()
        for t, row, column in np.argwhere(cells.is_strict_background)[::37]:
            y, x = row * 16, column * 16
            assert not owners[t, max(y - 4, 0) : y + 20, max(x - 4, 0) : x + 20].any()


def test_importing_the_package_is_light() -> None:
    code = "import sys, vidspec_models.bundled; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
