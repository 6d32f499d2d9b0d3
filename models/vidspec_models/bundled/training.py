"""Trains the bundled pair from nothing, stage by stage, and exports it. One command that can be stopped and resumed."""

from __future__ import annotations

import logging

import torch

from .distil_stage import train_draft
from .export import export_pair
from .harden_stage import harden_target
from .joint_stage import train_joint
from .options import STAGES, Stage, TrainOptions
from .tower_stage import train_tower

__all__ = ["STAGES", "Stage", "TrainOptions", "train"]

logger = logging.getLogger(__name__)


def train(options: TrainOptions) -> None:
    """Run the chosen stages in order and export the pair; a finished stage is skipped when resuming.

    On CPUs set `THP_MEM_ALLOC_ENABLE=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184
    MALLOC_ARENA_MAX=1 OMP_WAIT_POLICY=PASSIVE` before starting: page faults otherwise take half of the time.
    """
    torch.manual_seed(options.seed)
    runs = {"tower": train_tower, "joint": train_joint, "harden": harden_target, "distil": train_draft}
    for stage in options.stages:
        logger.info("stage %s: %.1f minutes", stage, options.minutes(stage))
        runs[stage](options)
    target, draft = export_pair(options)
    logger.info("exported %s and %s", target, draft)
