"""What `bench compression` compares: methods, and configurations (the lines of its table). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vidspec_service.engine.config import DyCoke


class Method(StrEnum):
    """How to choose the video tokens to keep. `ttm` is DyCoke without stage two, which hides keys while decoding."""

    NONE = "none"
    RANDOM = "random"
    UNIFORM = "uniform"
    TTM = "ttm"
    DYCOKE = "dycoke"
    VIDCOM2 = "vidcom2"
    V_CAST = "v-cast"
    EARLYTOM = "earlytom"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """One line of the table."""

    method: Method
    frames: int
    ratio: float = 1.0  # share of the video's tokens that is kept; DyCoke keeps at least a quarter
    dycoke: DyCoke | None = None  # settings of the second stage, which hides keys; None without it

    @property
    def label(self) -> str:
        return self.method if self.method is Method.NONE else f"{self.method} {self.ratio:.0%}"
