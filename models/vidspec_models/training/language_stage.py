"""Shared by the stages of the language models: a stage defines what is trained on which loss; `run_stage` runs it.

Every step is split into units of a few clips, which workers process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from vidspec_models.training.architecture import Role, build_model
from vidspec_models.training.examples import ExamplePacker, PackedText, make_pair_text
from vidspec_models.training.forward import Learner, PackedForward
from vidspec_models.training.optimiser import MuonWithAdamW, Workers
from vidspec_models.training.options import Stage, TrainOptions
from vidspec_models.training.stage_run import DECAY_FROM, StageRun, load_part
from vidspec_models.training.tokenizer import build_tokenizer
from vidspec_models.training.tower import FrozenTower

_PAIR_TEXT = 96  # text tokens of a pair of clips: about four questions


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a stage: when it begins (share of the stage), clips per step, visual and text tokens per clip."""

    begins: float
    num_clips: int
    num_visual: int
    text_len: int
    layer_step: int = 1  # every `layer_step`-th layer of the target is in use


class LanguageStage(ABC):
    """A stage of the language models: what is trained, how fast, and on which loss."""

    name: ClassVar[Stage]
    phases: ClassVar[tuple[Phase, ...]]
    first_clip: ClassVar[int] = 0  # the stages train on different clips
    learning_rates: ClassVar[tuple[float, float]]  # of matrices, and of all other parameters
    decay_from: ClassVar[float] = DECAY_FROM
    pair_share: ClassVar[float]  # share of the units with questions about pairs, in stages that call `pair_text`

    trained: dict[str, nn.Module]  # saved in the checkpoint with the optimiser

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.tokenizer = build_tokenizer()
        self.packer = ExamplePacker(self.tokenizer)
        self.tower = FrozenTower(options)
        self.forward = PackedForward(compile_layers=options.compile_models)

    def load_learner(self, role: Role, stage: Stage = "joint") -> Learner:
        """The target or the draft from a stage's checkpoint."""
        learner = Learner(build_model(role, self.tokenizer.get_vocab(), self.options.seed))
        learner.load_state_dict(load_part(self.options.work_dir, stage, role))
        return learner.to(self.device)

    def pair_text(self, clips: range, generator: torch.Generator) -> PackedText | None:
        """Questions about two clips at once, for some of the units."""
        if float(torch.rand(1, generator=generator)) >= self.pair_share:
            return None
        text = make_pair_text(self.packer, self.options.seed, clips, _PAIR_TEXT)
        return None if text is None else text.to(self.device)

    def begin_step(self, phase: Phase, progress: float) -> None:
        """Called before the units of every step; `progress` is the share of the stage that has passed."""
        self.progress = progress

    @abstractmethod
    def loss(self, clips: range, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss on some of a step's clips, and figures to report; a figure that is NaN (not measured) is skipped."""


def run_stage(make: Callable[[TrainOptions], LanguageStage], options: TrainOptions) -> None:
    """Run or resume a stage; the results are the parts of its checkpoint."""
    workers = Workers(options.device, options.workers)
    stage = make(options)
    matrix_lr, other_lr = stage.learning_rates
    optimiser = MuonWithAdamW(stage.trained, workers, matrix_lr=matrix_lr, other_lr=other_lr)
    run = StageRun(stage.name, options, {**stage.trained, "optimiser": optimiser}, decay_from=stage.decay_from)
    for _ in run.steps():
        phase = [phase for phase in stage.phases if phase.begins <= run.progress][-1]
        stage.begin_step(phase, run.progress)
        first = stage.first_clip + run.clips_seen
        units = workers.units(range(first, first + phase.num_clips))
        found = workers.map(partial(_run_unit, stage, phase, optimiser, options.seed), units, key=phase)
        run.clips_seen += phase.num_clips
        norm = optimiser.step(run.lr_scale)
        run.report(norm=norm, **_mean_figures(found))


def _run_unit(
    stage: LanguageStage, phase: Phase, optimiser: MuonWithAdamW, seed: int, clips: range
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + clips.start)
    loss, figures = stage.loss(clips, phase, generator)
    optimiser.add_gradients(loss * (len(clips) / phase.num_clips))
    return figures


def _mean_figures(found: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every figure over the units that have it."""
    means = {}
    for name in sorted({name for figures in found for name in figures}):
        known = [figures[name] for figures in found if not math.isnan(figures.get(name, math.nan))]
        if known:
            means[name] = sum(known) / len(known)
    return means
