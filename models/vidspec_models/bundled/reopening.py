"""Checkpoints made of an exported pair, so that a later stage can go on where the run's own ones are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlavaOnevisionForConditionalGeneration

from .architecture import TARGET_SIZE
from .lm_forward import Learner
from .options import Stage, TrainOptions


def reopen(target: Path, draft: Path, options: TrainOptions) -> None:
    """Write what the stages "tower" and "joint" would have left, but for optimisers: only later stages can go on.

    Weights are the exported ones, in bfloat16's precision. Raises FileExistsError where a run has its own checkpoints.
    """
    opened = {role: _open(folder) for role, folder in (("target", target), ("draft", draft))}
    learners = {role: Learner(model).state_dict() for role, model in opened.items()}
    growth = {"used": list(range(TARGET_SIZE.layers))}
    _write(options, "tower", {"tower": opened["target"].model.vision_tower.state_dict()})
    _write(options, "joint", {**learners, "growth": growth})


def _open(folder: Path) -> Any:
    return LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def _write(options: TrainOptions, stage: Stage, parts: dict[str, Any]) -> None:
    path = options.work_dir / f"{stage}.pt"
    if path.exists():
        raise FileExistsError(f"{path} is there already; choose another work folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"parts": parts}, path)
