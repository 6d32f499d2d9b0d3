"""Clip: what decoding hands over, frames with exact timestamps and the facts of their source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Chosen frames of one video. Rotation is applied; timestamps start at the video's first frame."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] RGB
    timestamps_s: tuple[float, ...]  # [T]
    source_indices: tuple[int, ...]  # [T] display-order index of each chosen frame in the source
    source_fps: float  # average rate: frames / duration
    source_num_frames: int
    duration_s: float
    width: int  # of `frames`: after rotation, and after scaling down to max_frame_pixels
    height: int
    codec: str
    warnings: tuple[str, ...] = ()
