"""Muon's update is close to orthogonal."""

from __future__ import annotations

import torch

from vidspec_models.training.optimiser import Muon, Workers


def test_muon_steps_are_roughly_orthogonal() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 48))
    weight.grad = torch.randn(16, 48)
    Muon([weight], Workers("cpu", 1), lr=1.0).step()
    singular = torch.linalg.svdvals(weight.detach() / (0.2 * 48**0.5))
    assert singular.min() > 0.4
    assert singular.max() < 1.8
