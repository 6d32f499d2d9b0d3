"""Fewer video rows on the target: V-CAST, VidCom2, EarlyTom, and both stages of DyCoke (CVPR 2025, arXiv 2411.15024).

This module has their parameters and needs no torch, so that every process can import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

REFRESH_TOKENS = 16  # answer rows that share one selection of video rows (the paper selects anew for each row)
DEFAULT_RATIO = 0.25  # share of a video's tokens that stays: the papers of V-CAST and VidCom2 compare at this ratio
_COMPARED = 3 / 4  # share of DyCoke's frames that are partly replaced by an earlier frame
_ROUNDING = 1e-9  # (1 - 0.9) * 10 is slightly below 1 in floating point
_MAX_MERGED = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCoke:
    """The letters are the paper's. `hide_ratio` 0 leaves keys and values unchanged: temporal merging only."""

    merge_ratio: float = 0.5  # K: share of a compared frame's tokens that an earlier frame replaces
    layer: int = 3  # L: first layer, counted from 0, whose attention leaves tokens out
    hide_ratio: float = 0.7  # P: share of the remaining video tokens that layers from L on do not attend to

    def __post_init__(self) -> None:
        for name in ("merge_ratio", "hide_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name):g}")
        if self.layer < 1:
            raise ValueError(f"layer must be at least 1, not {self.layer}: the layer before it selects")


def merge_ratio_of(ratio: float) -> float:
    """The K with which DyCoke keeps a share `ratio` of whole windows' tokens; a quarter of them always stays."""
    return min((1 - ratio) / _COMPARED, _MAX_MERGED)


def ratio_of(merge_ratio: float) -> float:
    """The share of whole windows' tokens that DyCoke keeps with K = `merge_ratio`."""
    return 1 - _COMPARED * merge_ratio


def num_left(count: int, ratio: float) -> int:
    """Number of tokens left if a share `ratio` of `count` tokens is removed, rounded down."""
    return floor((1 - ratio) * count + _ROUNDING)
