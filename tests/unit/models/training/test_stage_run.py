"""Running a stage: it resumes where it stopped, and its units add up to the whole step."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vidspec_models.training.language_stage import LanguageStage, Phase, run_stage
from vidspec_models.training.options import TrainOptions
from vidspec_models.training.stage_run import StageRun


def test_a_stage_resumes_its_clock_and_parts(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path, tower_minutes=0.0005)
    layer = torch.nn.Linear(2, 2)
    run = StageRun("tower", options, {"layer": layer})
    steps = list(run.steps())
    assert steps[0] == 0
    fresh = torch.nn.Linear(2, 2)
    again = StageRun("tower", options, {"layer": fresh})
    assert torch.equal(fresh.weight, layer.weight)
    assert again.step == len(steps)
    assert list(again.steps()) == []


def test_a_step_without_a_number_leaves_the_averages_as_they_were(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path)
    run = StageRun("tower", options, {})
    for norm in (math.nan, 2.0, math.inf, math.nan, 4.0):
        run.report(norm=norm)
    assert run._averages == {"norm": pytest.approx(2.1)}


class _Line(LanguageStage):
    """One weight, whose gradient is the mean of the clips' numbers."""

    name = "distil"
    phases = (Phase(0.0, 6, 0, 0), Phase(0.5, 4, 0, 0))
    first_clip = 100
    learning_rates = (0.0, 0.0)

    def __init__(self, seen: list[range]) -> None:  # no models
        self.trained = {"line": torch.nn.Linear(1, 1)}
        self._seen = seen

    def loss(self, clips: range, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        self._seen.append(clips)
        (bias,) = (param for param in self.trained["line"].parameters() if param.ndim == 1)
        return bias.sum() * sum(clips) / len(clips), {}


def test_the_units_of_a_step_are_its_clips_and_its_gradient_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    monkeypatch.setattr(StageRun, "report", lambda _, norm: norms.append(norm))
    monkeypatch.setattr("vidspec_models.training.stage_run.time", SimpleNamespace(monotonic=count().__next__))
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path, distil_minutes=4 / 60, workers=1)
    seen: list[range] = []
    run_stage(lambda _: _Line(seen), options)
    assert [clip for clips in seen for clip in clips] == list(range(100, 120))
    assert norms == pytest.approx([102.5, 108.5, 113.5, 117.5])
