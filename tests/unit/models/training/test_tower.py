"""The tower's stage: the independence term, and reproducible batches."""

from __future__ import annotations

import pytest
import torch

from vidspec_models.training.tower import leak_ratio, make_tower_batch


def test_leak_is_zero_for_equal_features_and_positive_for_others() -> None:
    full = torch.randn(4, 256, 8)
    clear = torch.ones(4, 256)
    assert leak_ratio(full, full.clone(), clear) == pytest.approx(0.0)
    assert float(leak_ratio(full, full[:2] + 1, clear)) > 0.5


def test_tower_batches_are_deterministic_and_labelled() -> None:
    one, two = make_tower_batch(0, 0), make_tower_batch(0, 0)
    assert torch.equal(one.frames, two.frames)
    assert {int(kind) for kind in one.labels["kind"].unique()} >= {0, 1}
    assert 0.5 < float(one.clear.mean()) < 1
