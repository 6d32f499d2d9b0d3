"""DecodeReport: all that `bench decode` says, as it goes into the JSON file; table and plot are made from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from vidspec_service.bench.decode.options import BASELINE, Reader
from vidspec_service.bench.facts import Hardware

_SAME_FRAME = 6.0  # of 255: colour conversions differ by less, neighbouring frames of a moving picture by more


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderResult:
    """One reader on one clip: wall and processor time of each repeat, or why there are none."""

    wall_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    difference: float | None = None  # mean brightness, of 255, of the frame that is least like ours; None for ours
    error: str | None = None

    @property
    def median_s(self) -> float | None:
        return median(self.wall_s) if self.wall_s else None

    @property
    def has_same_frames(self) -> bool:
        """A library that gives other frames than those asked for is no peer, however fast."""
        return self.difference is None or self.difference < _SAME_FRAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipResult:
    """Every reader on one clip."""

    name: str
    codec: str
    duration_s: float
    source_num_frames: int
    num_frames: int
    frame_size: tuple[int, int]  # (width, height) as we give it
    readers: Mapping[Reader, ReaderResult]

    @property
    def fastest_other(self) -> Reader | None:
        """Of those that gave the frames asked for."""
        times = {
            reader: result.median_s
            for reader, result in self.readers.items()
            if not reader.is_ours and result.median_s is not None and result.has_same_frames
        }
        return min(times, key=lambda reader: times[reader]) if times else None

    def over_fastest_other(self, reader: Reader = BASELINE) -> float | None:
        """Time of one of our readers over the fastest other's; None where there is nothing to compare."""
        ours, other = self.readers[reader].median_s, self.fastest_other
        theirs = self.readers[other].median_s if other else None
        return ours / theirs if ours is not None and theirs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """`over_fastest_other` of each clip is in the file, too."""

    bench: str = "decode"
    created: str
    command: str
    baseline: str = "the fastest other library that gives the same frames"
    hardware: Hardware
    versions: Mapping[str, str]
    num_frames: int
    repeats: int
    not_installed: tuple[Reader, ...]
    clips: tuple[ClipResult, ...]
    load_average_before: float

    def to_json(self) -> str:
        """As written to the file."""
        content = dataclasses.asdict(self)
        for written, clip in zip(content["clips"], self.clips, strict=True):
            written["fastest_other"] = clip.fastest_other
            written["over_fastest_other"] = clip.over_fastest_other()
        return json.dumps(content, indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.to_json(), encoding="utf-8")
