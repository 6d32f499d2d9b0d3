"""What `bench compression` compares: methods, and the lines of its table. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vidspec_service.engine.config import DyCoke


class Method(StrEnum):
    """Which of a video's tokens stay; `ttm` is DyCoke without its second stage, which hides keys while decoding."""

    NONE = "none"
    RANDOM = "random"
    UNIFORM = "uniform"
    TTM = "ttm"
    DYCOKE = "dycoke"
    VIDCOM2 = "vidcom2"
    V_CAST = "v-cast"
    EARLYTOM = "earlytom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One line of the table."""

    method: Method
    frames: int
    ratio: float = 1.0  # share of the video's tokens that stays; DyCoke keeps a quarter at least
    dycoke: DyCoke | None = None  # whose second stage hides keys

    @property
    def label(self) -> str:
        return self.method if self.method is Method.NONE else f"{self.method} {self.ratio:.0%}"
