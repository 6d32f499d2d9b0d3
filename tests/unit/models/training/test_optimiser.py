"""Muon's update is close to orthogonal, and gradients that overflow never become an update."""

from __future__ import annotations

import pytest
import torch

from vidspec_models.training.optimiser import Muon, MuonWithAdamW, Workers


@pytest.mark.parametrize("in_bfloat16", [True, False])
def test_muon_steps_are_roughly_orthogonal(in_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vidspec_models.training.optimiser.is_faster_in_bfloat16", lambda: in_bfloat16)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(16, 48)) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.randn(16, 48, generator=generator)
    Muon(weights, Workers("cpu", 1), lr=1.0).step()
    singular = torch.linalg.svdvals(torch.stack([weight.detach() for weight in weights]) / (0.2 * 48**0.5))
    assert singular.min() > 0.4
    assert singular.max() < 1.8


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_gradients_that_are_no_numbers_change_no_weight(factor: float) -> None:
    layer = torch.nn.Linear(4, 4)
    before = [parameter.clone() for parameter in layer.parameters()]
    optimiser = MuonWithAdamW({"layer": layer}, Workers("cpu", 1), matrix_lr=1.0, other_lr=1.0)
    optimiser.add_gradients(layer(torch.ones(2, 4)).sum() * factor)
    optimiser.step(1.0)
    assert all(torch.equal(*pair) for pair in zip(before, layer.parameters(), strict=True))
