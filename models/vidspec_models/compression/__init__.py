"""Fewer video rows on the target: V-CAST, VidCom2, EarlyTom, and DyCoke (CVPR 2025, arXiv 2411.15024) with its second
stage.

Here are their parameters, without torch: every process may import them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

REFRESH_TOKENS = 16  # answer rows that share one selection of video rows (the paper selects anew for each)
DEFAULT_RATIO = 0.25  # of a video's tokens, the share that stays: what the papers of V-CAST and VidCom2 compare at
_COMPARED = 3 / 4  # of DyCoke's frames: those that another one stands for in part
_ROUNDING = 1e-9  # 0.3 * 10 is a hair below 3
_MOST_MERGED = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCoke:
    """Letters are the paper's. `hide_ratio` 0 leaves the keys and values alone: temporal merging only."""

    merge_ratio: float = 0.5  # K: of a compared frame's tokens, the share that an earlier frame stands for
    layer: int = 3  # L: first layer, counted from 0, whose attention leaves tokens out
    hide_ratio: float = 0.7  # P: of the video tokens left, the share that those layers do not attend to

    def __post_init__(self) -> None:
        for name in ("merge_ratio", "hide_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name):g}")
        if self.layer < 1:
            raise ValueError(f"layer must be at least 1, not {self.layer}: the layer before it selects")


def merge_ratio_of(ratio: float) -> float:
    """DyCoke's K that leaves a share of `ratio` of whole windows: a quarter of the tokens always stays."""
    return min((1 - ratio) / _COMPARED, _MOST_MERGED)


def ratio_of(merge_ratio: float) -> float:
    """What DyCoke's K leaves of whole windows."""
    return 1 - _COMPARED * merge_ratio


def num_left(count: int, ratio: float) -> int:
    """What is left of `count` tokens without the share `ratio` of them, rounded down."""
    return floor((1 - ratio) * count + _ROUNDING)
