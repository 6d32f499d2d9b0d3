"""The part of a clip that the draft sees."""

from __future__ import annotations

import torch

from vidspec_models.training.stages import draft_visibility


def test_draft_views_range_from_nothing_to_everything() -> None:
    views = draft_visibility(torch.zeros(400, 96, dtype=torch.bool), 0.4, torch.Generator().manual_seed(0))
    share = views.float().mean(dim=1)
    assert 0.3 < (share == 1).float().mean() < 0.5
    assert 0.08 < (share == 0).float().mean() < 0.25
