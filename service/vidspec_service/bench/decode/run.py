"""`bench decode`: every reader on every clip, in a process of its own; a table and comparison per clip, and a plot."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import RenderableType

from vidspec_service.bench.common.child import call_in_child
from vidspec_service.bench.common.loops import until_interrupted
from vidspec_service.bench.common.options import number
from vidspec_service.bench.common.report import OnProgress, Plot, Report, format_value, table
from vidspec_service.bench.common.scenes import ClipOptions
from vidspec_service.bench.decode.readers import Reader, brightness_grid, is_installed, time_reads
from vidspec_service.decoding.clip import Clip, DecodingLimits, FrameRequest
from vidspec_service.decoding.isolation import fork_server
from vidspec_service.decoding.isolation.fork_server import DecodeJob
from vidspec_service.decoding.isolation.process import DecodeChild, frames_memory
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.errors import ConfigError, VideoError
from vidspec_service.forking import ForkServer

_MAX_DIFFERENCE = 6.0  # of 255: colour conversions differ by less, neighbouring frames of a moving picture by more
_OURS, _OTHERS = "#1f5f8b", "#b0b0b0"
_START_TIMEOUT_S = 60.0
_LIMITS = DecodingLimits(timeout_s=600.0)  # long, because a slow reader is also a result


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderResult:
    """One reader on one clip: wall and processor time of each repeat, or the error."""

    wall_s: Sequence[float] = ()
    cpu_s: Sequence[float] = ()
    difference: float | None = None  # largest mean brightness difference of a frame from ours, of 255; None for ours
    error: str | None = None
    version: str = ""  # of the library; empty for ours

    @property
    def median_s(self) -> float | None:
        return median(self.wall_s) if self.wall_s else None

    @property
    def has_same_frames(self) -> bool:
        """Whether the frames match ours; a library that returns other frames is not compared, however fast."""
        return self.difference is None or self.difference < _MAX_DIFFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipResult:
    """Every reader on one clip."""

    name: str
    codec: str
    duration_s: float
    source_num_frames: int
    num_frames: int
    frame_size: tuple[int, int]  # (width, height) of the decoded frames
    readers: Mapping[Reader, ReaderResult]

    def times(self) -> dict[Reader, float]:
        """Median seconds of the readers that did not fail."""
        return {reader: each.median_s for reader, each in self.readers.items() if each.median_s is not None}

    @property
    def fastest_other(self) -> Reader | None:
        """The fastest library among those that returned the requested frames."""
        times = self.times()
        others = [each for each in times if not each.is_ours and self.readers[each].has_same_frames]
        return min(others, key=times.__getitem__, default=None)

    @property
    def over_fastest_other(self) -> float | None:
        """Our time on all cores divided by the fastest other's; None if there is nothing to compare."""
        times, other = self.times(), self.fastest_other
        return times[Reader.ALL_CORES] / times[other] if Reader.ALL_CORES in times and other else None


def decode_report(
    options: DecodeOptions, clips: Sequence[ClipResult], not_installed: Sequence[Reader], libraries: Mapping[str, str]
) -> Report:
    """Build the report; the JSON also has `fastest_other` and `over_fastest_other` of each clip."""
    body = [part for clip in clips for part in _of_clip(clip, options.repeats)]
    if not_installed:
        body.append(f"not installed: {', '.join(not_installed)}")
    return Report(
        bench="decode",
        baseline="the fastest other library that gives the same frames",
        facts={},
        libraries=libraries,
        figures={
            "num_frames": options.num_frames,
            "repeats": options.repeats,
            "not_installed": not_installed,
            "clips": [
                dataclasses.asdict(clip)
                | {"fastest_other": clip.fastest_other, "over_fastest_other": clip.over_fastest_other}
                for clip in clips
            ],
        },
        body=body,
        plots={"plot": Plot(size=(9, 1.5 + 2.2 * len(clips)), draw=lambda figure: _draw(figure, clips))},
    )


def _of_clip(clip: ClipResult, repeats: int) -> Iterator[RenderableType]:
    width, height = clip.frame_size
    facts = f"{clip.codec}, {clip.duration_s:.1f} s, {clip.source_num_frames} frames"
    title = f"{clip.name} ({facts}): {clip.num_frames} frames of {width}x{height}, median of {repeats}"
    ours = clip.readers[Reader.CHILD].median_s
    columns = {
        "reader": lambda row: row[0],
        "wall ms": lambda row: format_value(row[1].median_s, "{:.1f}", 1000) if row[1].wall_s else "failed",
        "fastest": lambda row: format_value(min(row[1].wall_s, default=None), "{:.1f}", 1000),
        "slowest": lambda row: format_value(max(row[1].wall_s, default=None), "{:.1f}", 1000),
        "CPU ms": lambda row: format_value(median(row[1].cpu_s) if row[1].cpu_s else None, "{:.1f}", 1000),
        "ms/frame": lambda row: format_value(row[1].median_s, "{:.2f}", 1000 / clip.num_frames),
        "vs vidspec": lambda row: format_value(row[1].median_s, "{:.2f}x", 1 / ours) if ours else "-",
        "unlike ours": lambda row: format_value(row[1].difference, "{:.1f}") + ("" if row[1].has_same_frames else " !"),
    }
    yield table(title, columns, clip.readers.items())
    if all(reader.is_ours for reader in clip.readers):
        yield "no other library to compare with: pip install opencv-python-headless"
    elif (over := clip.over_fastest_other) is None:
        yield "nothing to compare: no other library gave the same frames as vidspec"
    else:
        yield f"on all cores, vidspec takes {over:.2f}x the time of the fastest other, {clip.fastest_other}"
    for reader, result in clip.readers.items():
        if result.error is not None:
            yield f"{reader}: {result.error}"


def _draw(figure: Any, clips: Sequence[ClipResult]) -> None:
    """Draw one group of bars per clip, in milliseconds."""
    all_axes = figure.subplots(len(clips), 1, squeeze=False)[:, 0]
    for axes, clip in zip(all_axes, clips, strict=True):
        times = clip.times()
        colours = [_OURS if reader.is_ours else _OTHERS for reader in times]
        bars = axes.barh(list(times), [1000 * seconds for seconds in times.values()], color=colours)
        axes.bar_label(bars, fmt="%.0f ms", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{clip.num_frames} frames of {clip.name}, {clip.codec}", parse_math=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(ClipOptions):
    """By default 32 frames of a minute of 720p."""

    num_frames: int = number(32, "--frames", "frames per clip")
    repeats: int = number(5, "--repeats", "timed reads")

    def __post_init__(self) -> None:
        if self.rendered_s == 0 and not self.clips:
            raise ConfigError("--seconds must be above 0, or 0 with --clip")


def measure_decoding(options: DecodeOptions, on_progress: OnProgress) -> Report:
    """Raises ConfigError for a clip that we cannot read, or if no decode child starts."""
    readers = [reader for reader in Reader if is_installed(reader)]
    total = len(readers) * (len(options.clips) + (options.rendered_s > 0))
    clips, libraries, done = list[ClipResult](), {"av": version("av")}, 0
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        for name, path in until_interrupted(options.files(Path(folder), on_progress)):
            try:
                clip = asyncio.run(_through_pool(path, options, 1, 0))[0]  # the frames that all readers must return
            except VideoError as error:
                raise ConfigError(f"{name}: {error}") from error
            found = {}
            for reader in readers:
                on_progress(f"{name}: {reader}", done, total)
                found[reader] = _measure(reader, path, clip, options)
                if found[reader].version:
                    libraries[reader.partition(",")[0]] = found[reader].version
                done += 1
            clips.append(
                ClipResult(
                    name=name,
                    codec=clip.codec,
                    duration_s=clip.video.duration_s,
                    source_num_frames=clip.source_num_frames,
                    num_frames=len(clip.video.frames),
                    frame_size=(clip.width, clip.height),
                    readers=found,
                )
            )
    not_installed = [reader for reader in Reader if reader not in readers]
    return decode_report(options, clips, not_installed, libraries)


def _measure(reader: Reader, path: Path, clip: Clip, options: DecodeOptions) -> ReaderResult:
    if reader in (Reader.POOL, Reader.ALL_CORES):
        num_workers = 1 if reader is Reader.POOL else num_cores()
        found, wall_s = asyncio.run(_through_pool(path, options, num_workers, options.repeats))
        means = [brightness_grid(frame) for frame in found.video.frames]
        return ReaderResult(wall_s=wall_s, difference=difference(clip, means))
    if reader is Reader.COLD:
        times = [asyncio.run(_time_cold(path.absolute(), options)) for _ in range(options.repeats)]
        return ReaderResult(wall_s=tuple(times))
    try:
        answer = call_in_child(time_reads, reader, str(path), options.repeats, clip.source_indices)
    except ConfigError as error:  # the reader crashed its process
        return ReaderResult(error=str(error))
    if "error" in answer:
        return ReaderResult(**answer)
    return ReaderResult(difference=difference(clip, answer.pop("means")), **answer)


def difference(clip: Clip, found: Sequence[Sequence[float]]) -> float:
    """The largest mean difference of a frame's squares from ours, of 255; 255 if the number of frames differs."""
    if len(found) != len(clip.video.frames):
        return 255.0
    ours = np.array([brightness_grid(frame) for frame in clip.video.frames])
    return float(np.abs(ours - np.array(found)).mean(axis=1).max())


async def _through_pool(path: Path, options: DecodeOptions, num_workers: int, repeats: int) -> tuple[Clip, list[float]]:
    """The clip with our choice of frames, and the seconds of each decoding after a first one, with spares ready."""
    request, times = FrameRequest(num_frames=options.num_frames), list[float]()
    async with DecodePool(_LIMITS, num_workers) as pool:
        clip = await pool.decode(path, request)
        for _ in range(repeats):
            started = time.perf_counter()
            clip = await pool.decode(path, request)
            times.append(time.perf_counter() - started)
    return clip, times


async def _time_cold(path: Path, options: DecodeOptions) -> float:
    request = FrameRequest(num_frames=options.num_frames)
    job = DecodeJob(path=bytes(path), request=request, limits=_LIMITS)
    started = time.perf_counter()
    with closing(ForkServer(fork_server.__name__, is_bare=True)) as forks:
        child = DecodeChild(forks)
        await child.start(_START_TIMEOUT_S)
        with frames_memory() as frames:
            await child.decode(job, frames)
        return time.perf_counter() - started
