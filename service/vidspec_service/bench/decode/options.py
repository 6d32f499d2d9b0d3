"""What a run of `bench decode` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Reader(StrEnum):
    """The ways to get frames that are compared. A library's own defaults, but where its name says otherwise."""

    CHILD = "vidspec"  # what the decode child does with the file: the work itself
    POOL = "vidspec, spare ready"  # from `DecodePool.decode` to the clip, as a request sees it
    COLD = "vidspec, cold"  # with the child's whole start: a request that finds no spare
    OPENCV = "opencv"  # reads on to each frame
    OPENCV_SEEK = "opencv, seeking"
    TORCHCODEC = "torchcodec"
    DECORD = "decord"

    @property
    def is_ours(self) -> bool:
        return self in (Reader.CHILD, Reader.POOL, Reader.COLD)


BASELINE = Reader.CHILD


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """Defaults are those of the issue's table: 32 frames of a minute of 720p."""

    clips: tuple[Path, ...] = ()  # besides, or instead of, the rendered one
    rendered_s: float = 60.0  # length of the rendered clip; 0 for none
    num_frames: int = 32
    repeats: int = 5
