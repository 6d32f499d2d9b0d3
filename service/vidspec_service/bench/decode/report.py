"""What `bench decode` says: a table and a verdict for each clip, and bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import RenderableType

from vidspec_service.bench.common.report import Picture, Report, number, table
from vidspec_service.bench.decode.readers import Reader

_SAME_FRAME = 6.0  # of 255: colour conversions differ by less, neighbouring frames of a moving picture by more
_OURS, _OTHERS = "#1f5f8b", "#b0b0b0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderResult:
    """One reader on one clip: wall and processor time of each repeat, or why there are none."""

    wall_s: Sequence[float] = ()
    cpu_s: Sequence[float] = ()
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

    @property
    def over_fastest_other(self) -> float | None:
        """Our child's time over the fastest other's; None where there is nothing to compare."""
        ours, other = self.readers[Reader.CHILD].median_s, self.fastest_other
        theirs = self.readers[other].median_s if other else None
        return ours / theirs if ours is not None and theirs else None


def decode_report(
    clips: Sequence[ClipResult],
    not_installed: Sequence[Reader],
    num_frames: int,
    repeats: int,
    libraries: Mapping[str, str],
) -> Report:
    """`fastest_other` and `over_fastest_other` of each clip are in the file, too."""
    body = [part for clip in clips for part in _of_clip(clip, repeats)]
    if not_installed:
        body.append(f"not installed: {', '.join(not_installed)}")
    return Report(
        bench="decode",
        baseline="the fastest other library that gives the same frames",
        subject=f"{num_frames} frames",
        facts={},
        libraries=libraries,
        figures={
            "num_frames": num_frames,
            "repeats": repeats,
            "not_installed": not_installed,
            "clips": [
                {
                    **dataclasses.asdict(clip),
                    "fastest_other": clip.fastest_other,
                    "over_fastest_other": clip.over_fastest_other,
                }
                for clip in clips
            ],
        },
        body=body,
        pictures={"plot": Picture(size=(9, 1.5 + 2.2 * len(clips)), draw=lambda figure: _draw(figure, clips))},
    )


def _of_clip(clip: ClipResult, repeats: int) -> Iterator[RenderableType]:
    width, height = clip.frame_size
    facts = f"{clip.codec}, {clip.duration_s:.1f} s, {clip.source_num_frames} frames"
    title = f"{clip.name} ({facts}): {clip.num_frames} frames of {width}x{height}, median of {repeats}"
    ours = clip.readers[Reader.CHILD].median_s
    columns = {
        "reader": lambda row: row[0],
        "wall ms": lambda row: number(row[1].median_s, "{:.1f}", 1000) if row[1].wall_s else "failed",
        "fastest": lambda row: number(min(row[1].wall_s, default=None), "{:.1f}", 1000),
        "slowest": lambda row: number(max(row[1].wall_s, default=None), "{:.1f}", 1000),
        "CPU ms": lambda row: number(median(row[1].cpu_s) if row[1].cpu_s else None, "{:.1f}", 1000),
        "ms/frame": lambda row: number(row[1].median_s, "{:.2f}", 1000 / clip.num_frames),
        "vs vidspec": lambda row: number(row[1].median_s, "{:.2f}x", 1 / ours) if ours else "-",
        "unlike ours": lambda row: number(row[1].difference, "{:.1f}") + ("" if row[1].has_same_frames else " !"),
    }
    yield table(title, columns, clip.readers.items())
    if (over := clip.over_fastest_other) is None:
        yield "no other library to compare with: pip install opencv-python-headless"
    else:
        yield f"vidspec takes {over:.2f}x the time of the fastest other, {clip.fastest_other}"
    for reader, result in clip.readers.items():
        if result.error is not None:
            yield f"{reader}: {result.error}"


def _draw(figure: Any, clips: Sequence[ClipResult]) -> None:
    """One group of bars a clip, in milliseconds."""
    all_axes = figure.subplots(len(clips), 1, squeeze=False)[:, 0]
    for axes, clip in zip(all_axes, clips, strict=True):
        times = {reader: result.median_s for reader, result in clip.readers.items() if result.median_s is not None}
        colours = [_OURS if reader.is_ours else _OTHERS for reader in times]
        bars = axes.barh(list(times), [1000 * seconds for seconds in times.values()], color=colours)
        axes.bar_label(bars, fmt="%.0f ms", padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{clip.num_frames} frames of {clip.name}, {clip.codec}", fontsize=9, loc="left")
