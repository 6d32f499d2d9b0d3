"""Runs a training stage: wall-clock schedule, progress bar, resumable checkpoints; reads other stages' checkpoints."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vidspec_models.errors import ModelLoadError
from vidspec_models.training.options import Stage, TrainOptions

logger = logging.getLogger(__name__)
_CHECKPOINT_EVERY_S = 180.0
_LOG_EVERY_S = 30.0
_WARM_UP_STEPS = 20
_LONGEST_STEP_S = 60.0  # more is not counted: the process was stopped, or the machine was asleep
DECAY_FROM = 0.6  # share of a stage's time after which the learning rate decays


class StageRun:
    """Counts the wall clock of one stage across resumptions; the learning rate follows that clock, not the steps."""

    def __init__(
        self, stage: Stage, options: TrainOptions, parts: dict[str, Any], *, decay_from: float = DECAY_FROM
    ) -> None:
        self.stage = stage
        self.step = 0
        self.clips_seen = 0
        self._parts = parts  # everything with state_dict/load_state_dict that a resumption needs
        self._path = options.work_dir / f"{stage}.pt"
        self._seed = options.seed
        self._total_s = options.minutes(stage) * 60
        self._elapsed_s = 0.0
        self._decay_from = decay_from
        self._averages: dict[str, float] = {}
        if options.resume and self._path.exists():
            self._load()
        self._first_step = self.step

    @property
    def progress(self) -> float:
        return min(self._elapsed_s / self._total_s, 1.0)

    @property
    def lr_scale(self) -> float:
        """Warm-up (again after a resumption), flat, then linearly down to almost nothing."""
        warm = min((self.step - self._first_step + 1) / _WARM_UP_STEPS, 1.0)
        if self.progress <= self._decay_from:
            return warm
        return warm * max((1 - self.progress) / (1 - self._decay_from), 0.01)

    def steps(self) -> Iterator[int]:
        """Step numbers until the minutes are used up; saves on the way and at the end."""
        last_saved = last_logged = last = time.monotonic()
        bar = tqdm(total=round(self._total_s), initial=round(self._elapsed_s), desc=self.stage, unit="s", mininterval=5)
        try:
            while self._elapsed_s < self._total_s:
                yield self.step
                self.step += 1
                now = time.monotonic()
                self._elapsed_s += min(now - last, _LONGEST_STEP_S)
                last = now
                bar.n = min(round(self._elapsed_s), bar.total)
                bar.set_postfix_str(self._summary(), refresh=True)
                if now - last_logged > _LOG_EVERY_S:
                    minutes = self._elapsed_s / 60
                    logger.info("%s step %d at %.1f min: %s", self.stage, self.step, minutes, self._summary())
                    last_logged = now
                if now - last_saved > _CHECKPOINT_EVERY_S:
                    self.save()
                    last_saved = now
        finally:
            bar.close()
        self.save()

    def report(self, **values: float) -> None:
        """Update the running averages in the bar and the log; skips NaN, which an average would never lose again."""
        for name, value in values.items():
            if math.isfinite(value):
                self._averages[name] = 0.95 * self._averages.get(name, value) + 0.05 * value

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        counters = {"step": self.step, "elapsed_s": self._elapsed_s, "clips_seen": self.clips_seen}
        content = {"parts": state, "counters": counters, "averages": self._averages, "seed": self._seed}
        write_checkpoint(content, self._path)

    def _load(self) -> None:
        saved = _read_checkpoint(self._path)
        if "counters" not in saved:
            raise ModelLoadError(
                f"{self._path} holds shipped weights, without the optimiser that stage {self.stage} needs: "
                "choose another --work-dir"
            )
        if (seed := saved.get("seed", self._seed)) != self._seed:
            raise ModelLoadError(
                f"{self._path} is of a run with --seed {seed}, not {self._seed}: give that seed, choose another "
                "--work-dir, or start anew with --no-resume"
            )
        for name, part in self._parts.items():
            part.load_state_dict(saved["parts"][name])
        self.step = saved["counters"]["step"]
        self.clips_seen = saved["counters"]["clips_seen"]
        self._elapsed_s = saved["counters"]["elapsed_s"]
        self._averages = saved["averages"]
        logger.info("%s resumes at step %d, %.1f min", self.stage, self.step, self._elapsed_s / 60)

    def _summary(self) -> str:
        return " ".join(f"{name}={value:.3f}" for name, value in self._averages.items())


def load_part(work_dir: Path, stage: Stage, part: str) -> dict[str, Any]:
    """One saved part of a finished (or running) stage."""
    loaded: dict[str, Any] = _read_checkpoint(work_dir / f"{stage}.pt")["parts"][part]
    return loaded


def write_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:  # torch may raise its own while it handles that of a full disk
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    os.replace(temporary, path)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Raises ModelLoadError for a damaged file."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes can be anything, and torch has no error of its own for them
        told = f"checkpoint {path} cannot be read ({type(error).__name__}); without it, {path.stem} starts anew"
        raise ModelLoadError(told) from error
    return saved


def unhardened_target(work_dir: Path) -> Stage:
    """The stage whose target hardening starts from."""
    return "widen" if (work_dir / "widen.pt").exists() else "joint"


def finished_target(work_dir: Path) -> Stage:
    """The stage with the newest target: the hardened one if there is one."""
    return "harden" if (work_dir / "harden.pt").exists() else unhardened_target(work_dir)
