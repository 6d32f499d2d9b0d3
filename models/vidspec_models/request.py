"""What a model is asked, as the service sends it and workers read it; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """One clip's chosen frames, as the model will see them."""

    frames: NDArray[np.uint8]  # [T, H, W, 3] RGB
    source_indices: tuple[int, ...]  # [T] display-order index of each chosen frame in the source
    source_fps: float  # average rate: frames / duration
    source_num_frames: int
    duration_s: float
    key: str | None = None  # equal keys mean equal frames; None: never shared
