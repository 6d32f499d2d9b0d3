"""The stage that widens the range of questions the target can answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.training.export import reopen
from vidspec_models.training.options import TrainOptions
from vidspec_models.training.stages import WidenStage


@pytest.mark.slow
@pytest.mark.parametrize(("num_frames", "pair_share"), [(8, 0.0), (8, 1.0), (16, 1.0)])
def test_single_clips_and_pairs_give_gradients(
    num_frames: int, pair_share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WidenStage, "pair_share", pair_share)
    monkeypatch.setattr("vidspec_models.training.stages.draw_num_frames", lambda _: num_frames)
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path, compile_models=False)
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    stage = WidenStage(options)
    loss, figures = stage.loss(range(2), stage.phases[0], torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(loss, [stage.target.lm.layers[0].mlp.up_proj.weight])
    assert gradient.isfinite().all()
    assert ("pair" in figures) == (bool(pair_share) and num_frames == 8)
