"""Options of `bench compression`: methods, and configurations (the lines of its table). Does not import torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from vidspec_service.arguments import positive_int
from vidspec_service.bench.common.options import choices, number, option
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


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 < value <= 0.99:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 0.99, not {text}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """The defaults are the settings that the papers compare."""

    num_clips: int = number(24, "--clips", "number of test clips")
    frames: tuple[int, ...] = option(
        (8, 16, 64), "--frames", "frames per clip (default 8 16 64)", type=positive_int, nargs="+", metavar="N"
    )
    ratios: tuple[float, ...] = option(
        (0.25, 0.5), "--ratios", "shares of tokens to keep (default 0.25 0.5)", type=_ratio, nargs="+", metavar="R"
    )
    methods: tuple[Method, ...] = choices(tuple(Method)[1:], "--methods", "methods to compare (default: all)")
    dycoke: DyCoke = field(default_factory=DyCoke)  # L and P
    max_tokens: int = number(160, "--max-tokens", "maximum tokens per caption")

    def configs(self) -> list[CompressionConfig]:
        """All configurations; for each number of frames, the baseline comes first."""
        found = []
        for frames in self.frames:
            found.append(CompressionConfig(method=Method.NONE, frames=frames))
            for method, ratio in product(self.methods, self.ratios):
                dycoke = self.dycoke if method is Method.DYCOKE else None
                found.append(CompressionConfig(method=method, frames=frames, ratio=ratio, dycoke=dycoke))
        return found
