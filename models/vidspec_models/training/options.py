"""Options of a training run: folders, minutes per stage, device, seed. Must not import torch: the CLI imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Stage = Literal["tower", "joint", "widen", "harden", "distil"]
STAGES: tuple[Stage, ...] = ("tower", "joint", "widen", "harden", "distil")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One training run. Minutes are wall-clock time, added up over resumed runs."""

    work_dir: Path  # checkpoints; a run with `resume` continues from the newest
    output_dir: Path  # receives target/ and draft/
    tower_minutes: float = 14.5
    joint_minutes: float = 260.0
    widen_minutes: float = 120.0
    harden_minutes: float = 60.0
    distil_minutes: float = 45.0
    stages: tuple[Stage, ...] = STAGES
    device: str = "cpu"
    seed: int = 0
    resume: bool = True
    compile_models: bool = True
    workers: int = 2  # threads on a CPU, see optimiser.py; a GPU uses none

    def missing_for(self, stage: Stage) -> list[Stage]:
        """The stages that this one begins from and that have left no checkpoint; *widen* and *harden* are optional."""
        before = STAGES[: min(STAGES.index(stage), STAGES.index("widen"))]
        return [each for each in before if not (self.work_dir / f"{each}.pt").exists()]

    def minutes(self, stage: Stage) -> float:
        minutes: float = getattr(self, f"{stage}_minutes")
        return minutes
