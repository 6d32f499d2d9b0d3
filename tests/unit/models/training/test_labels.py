"""Dense labels: what counts as empty has nothing near it."""

from __future__ import annotations

import numpy as np

from vidspec_models.bundled import sample_scene, slot_times
from vidspec_models.bundled.render import render_with_owners
from vidspec_models.training.labels import find_cells


def test_strict_background_cells_keep_their_distance() -> None:
    for seed in range(20):
        _, owners = render_with_owners(sample_scene(seed), slot_times())
        cells = find_cells(owners)
        assert not (cells.is_strict_background & ~cells.is_clear).any()
        for t, row, column in np.argwhere(cells.is_strict_background)[::37]:
            y, x = row * 16, column * 16
            assert not owners[t, max(y - 4, 0) : y + 20, max(x - 4, 0) : x + 20].any()
