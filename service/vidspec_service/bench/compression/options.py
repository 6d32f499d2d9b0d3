"""What a run of `bench compression` is asked to do, and the configurations that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from vidspec_service.engine.types import DyCoke


class Method(StrEnum):
    """How much of DyCoke: nothing, temporal merging of the prompt, or hiding keys and values while decoding, too."""

    NONE = "none"
    TTM = "ttm"
    DYCOKE = "dycoke"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One line of the table."""

    method: Method
    frames: int
    dycoke: DyCoke  # both ratios are 0 for `none`, the second one for `ttm`

    @property
    def label(self) -> str:
        return self.method if self.method is Method.NONE else f"{self.method} K={self.dycoke.merge_ratio:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """Defaults are those of the paper and of the issue's table."""

    num_clips: int = 24
    frames: tuple[int, ...] = (16, 64)
    ratios: tuple[float, ...] = (0.3, 0.5, 0.7)  # K
    dycoke: DyCoke = field(default_factory=DyCoke)  # L and P
    max_tokens: int = 160

    def configurations(self) -> list[Configuration]:
        """For each number of frames the baseline first."""
        off = replace(self.dycoke, merge_ratio=0.0, hide_ratio=0.0)
        kinds = [(Method.NONE, off)]
        kinds += [(Method.TTM, replace(off, merge_ratio=ratio)) for ratio in self.ratios]
        kinds += [(Method.DYCOKE, replace(self.dycoke, merge_ratio=ratio)) for ratio in self.ratios]
        return [
            Configuration(method=method, frames=frames, dycoke=dycoke)
            for frames in self.frames
            for method, dycoke in kinds
        ]
