"""Fewer video rows on the target: V-CAST, VidCom2, EarlyTom, and both stages of DyCoke (CVPR 2025, arXiv 2411.15024).

This module has their parameters and needs no torch, so that every process can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

REFRESH_TOKENS = 16  # answer rows that share one selection of video rows (the paper selects anew for each row)
DEFAULT_RATIO = 0.25  # share of a video's tokens that stays: the papers of V-CAST and VidCom2 compare at this ratio


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
