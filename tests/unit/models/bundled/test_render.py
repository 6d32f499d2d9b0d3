"""Pixels depend on scene and time only."""

from __future__ import annotations

import numpy as np
import pytest

from vidspec_models.bundled.render import render, render_with_owners, slot_times
from vidspec_models.bundled.scene import NUM_SLOTS, sample_scene


def test_the_same_seed_gives_the_same_pixels() -> None:
    one, two = (render(sample_scene(42), slot_times()) for _ in range(2))
    assert one.shape == (NUM_SLOTS, 128, 128, 3)
    assert one.dtype == np.uint8
    assert np.array_equal(one, two)


def test_frames_depend_on_their_time_only() -> None:
    scene = sample_scene(3)
    many = render(scene, (np.arange(64) + 0.5) / 64)
    some = render(scene, (np.arange(64)[::9] + 0.5) / 64)
    assert np.array_equal(many[::9], some)


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
