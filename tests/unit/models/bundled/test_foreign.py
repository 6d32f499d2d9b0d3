"""Foreign clips: determined by their seed, and of many kinds."""

from __future__ import annotations

import numpy as np

from vidspec_models.bundled.foreign import render_foreign


def test_frames_depend_on_the_seed_alone() -> None:
    assert np.array_equal(render_foreign(4, 8), render_foreign(4, 8))
    assert not np.array_equal(render_foreign(4, 8), render_foreign(5, 8))


def test_foreign_clips_differ_in_how_busy_they_are() -> None:
    clips = [render_foreign(seed, 2) for seed in range(12)]
    assert {clip.shape for clip in clips} == {(2, 128, 128, 3)}
    spreads = [float(clip.std()) for clip in clips]
    assert max(spreads) > min(spreads) + 20
