"""The bundled target and draft: the rendered domain they know, its texts, and where their weights lie.

Importing this package needs numpy alone; how the pair is trained and measured is in `vidspec_models.training`.
"""

from __future__ import annotations

from pathlib import Path

from vidspec_models.bundled.captions import caption, parse_caption
from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.render import render, slot_times
from vidspec_models.bundled.scene import (
    NUM_SLOTS,
    SCENE_DURATION_S,
    TEST_SEEDS,
    TRAIN_SEEDS,
    VALIDATION_SEEDS,
    Scene,
    sample_scene,
)

BUNDLED_TARGET = Path(__file__).parent / "weights" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "weights" / "draft"

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_TARGET",
    "NUM_SLOTS",
    "SCENE_DURATION_S",
    "TEST_SEEDS",
    "TRAIN_SEEDS",
    "VALIDATION_SEEDS",
    "Scene",
    "caption",
    "parse_caption",
    "questions",
    "render",
    "sample_scene",
    "slot_times",
]
