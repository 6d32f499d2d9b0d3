"""FrameRequest: which frames a caller wants, in time; resolved against real timestamps by frame_selection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRequest:
    """Either `fps` or `num_frames` (neither: the service fills in num_frames), over [start_s, end_s)."""

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    is_still: bool = False  # the file is an image: a clip of one frame
