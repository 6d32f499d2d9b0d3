"""Running a stage: it resumes where it stopped, and its units add up to the whole step."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vidspec_models.errors import ModelLoadError
from vidspec_models.training.language_stage import LanguageStage, Phase, run_stage
from vidspec_models.training.options import TrainOptions
from vidspec_models.training.stage_run import StageRun, write_checkpoint


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


def test_a_run_with_another_seed_is_not_resumed(tmp_path: Path) -> None:
    """It would go on with clips that are neither seed's."""
    StageRun("tower", TrainOptions(work_dir=tmp_path, output_dir=tmp_path, seed=3), {}).save()
    StageRun("tower", TrainOptions(work_dir=tmp_path, output_dir=tmp_path, seed=3), {})
    with pytest.raises(ModelLoadError, match=r"tower\.pt is of a run with --seed 3, not 4: .* --no-resume"):
        StageRun("tower", TrainOptions(work_dir=tmp_path, output_dir=tmp_path, seed=4), {})
    StageRun("tower", TrainOptions(work_dir=tmp_path, output_dir=tmp_path, seed=4, resume=False), {})


def test_a_step_without_a_number_leaves_the_averages_as_they_were(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path)
    run = StageRun("tower", options, {})
    for norm in (math.nan, 2.0, math.inf, math.nan, 4.0):
        run.report(norm=norm)
    assert run._averages == {"norm": pytest.approx(2.1)}


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda _: b"", lambda _: b"text"])
def test_a_damaged_checkpoint_is_one_readable_error(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path)
    StageRun("tower", options, {"layer": torch.nn.Linear(99, 99)}).save()
    checkpoint = tmp_path / "tower.pt"
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(ModelLoadError, match=r"tower.pt cannot be read \(.*\); without it, tower starts anew"):
        StageRun("tower", options, {"layer": torch.nn.Linear(99, 99)})


def test_shipped_weights_are_no_stage_to_go_on_from(tmp_path: Path) -> None:
    write_checkpoint({"parts": {"target": {}, "draft": {}}}, tmp_path / "joint.pt")
    with pytest.raises(ModelLoadError, match=r"joint.pt holds shipped weights"):
        StageRun("joint", TrainOptions(work_dir=tmp_path, output_dir=tmp_path), {})


def test_a_full_disk_is_told_as_such_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "tower.pt"
    checkpoint.write_text("before")
    (tmp_path / "tower.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_checkpoint({"parts": torch.zeros(99_999)}, checkpoint)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(checkpoint))
    assert checkpoint.read_text() == "before"


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
