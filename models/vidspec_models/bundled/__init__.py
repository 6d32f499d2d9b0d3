"""The bundled target and draft: a rendered domain, its texts, and where the trained pair lies.

Importing this package needs numpy alone; training and evaluation import torch in their own modules.
"""

from __future__ import annotations

from pathlib import Path

from .attributes import FRAME_SIZE, NUM_SLOTS, SCENE_DURATION_S
from .captions import caption, parse_caption
from .questions import Question, questions
from .render import render, slot_times
from .scene import TEST_SEEDS, TRAIN_SEEDS, VALIDATION_SEEDS, Scene, sample_scene

BUNDLED_TARGET = Path(__file__).parent / "weights" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "weights" / "draft"

__all__ = [
    "BUNDLED_DRAFT",
    "BUNDLED_TARGET",
    "FRAME_SIZE",
    "NUM_SLOTS",
    "SCENE_DURATION_S",
    "TEST_SEEDS",
    "TRAIN_SEEDS",
    "VALIDATION_SEEDS",
    "Question",
    "Scene",
    "caption",
    "parse_caption",
    "questions",
    "render",
    "sample_scene",
    "slot_times",
]
