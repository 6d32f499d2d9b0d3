"""The report as a table for each clip and as a bar chart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from textwrap import wrap

from rich.console import RenderableType
from rich.table import Table

from vidspec_service.bench.decode.options import BASELINE, Reader
from vidspec_service.bench.decode.report import ClipResult, DecodeReport, ReaderResult

_COLUMNS = ("wall ms", "fastest", "slowest", "CPU ms", "ms/frame", "vs vidspec", "unlike ours")
_OURS, _OTHERS = "#1f5f8b", "#b0b0b0"


def renderables(report: DecodeReport) -> Iterator[RenderableType]:
    """Facts, then a table and a verdict for each clip."""
    machine = report.hardware
    yield f"hardware  {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB"
    yield "versions  " + ", ".join(f"{name} {value}" for name, value in report.versions.items())
    yield f"baseline  {report.baseline}; load before the run: {report.load_average_before:.2f}"
    yield f"command   {report.command}"
    for clip in report.clips:
        yield _table(clip, report.repeats)
        yield _verdict(clip)
        for reader, result in clip.readers.items():
            if result.error is not None:
                yield f"{reader}: {result.error}"
    if report.not_installed:
        yield f"not installed: {', '.join(report.not_installed)}"


def _table(clip: ClipResult, repeats: int) -> Table:
    width, height = clip.frame_size
    facts = f"{clip.codec}, {clip.duration_s:.1f} s, {clip.source_num_frames} frames"
    title = f"{clip.name} ({facts}): {clip.num_frames} frames of {width}x{height}, median of {repeats}"
    table = Table(title=title, title_justify="left")
    table.add_column("reader")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    ours = clip.readers[BASELINE].median_s
    for reader, result in clip.readers.items():
        table.add_row(reader, *_cells(result, clip.num_frames, ours))
    return table


def _cells(result: ReaderResult, num_frames: int, ours: float | None) -> tuple[str, ...]:
    if result.median_s is None:
        return ("failed",)
    return (
        f"{1000 * result.median_s:.1f}",
        f"{1000 * min(result.wall_s):.1f}",
        f"{1000 * max(result.wall_s):.1f}",
        f"{1000 * median(result.cpu_s):.1f}" if result.cpu_s else "-",
        f"{1000 * result.median_s / num_frames:.2f}",
        f"{result.median_s / ours:.2f}x" if ours else "-",
        "-" if result.difference is None else f"{result.difference:.1f}" + ("" if result.has_same_frames else " !"),
    )


def _verdict(clip: ClipResult) -> str:
    ratio = clip.over_fastest_other()
    if ratio is None:
        return "no other library to compare with: pip install opencv-python-headless"
    return f"vidspec takes {ratio:.2f}x the time of the fastest other, {clip.fastest_other}"


def save_plot(report: DecodeReport, path: Path) -> None:
    """One group of bars a clip, in milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 2.2 * len(report.clips)), dpi=150, layout="constrained")
    all_axes = figure.subplots(len(report.clips), 1, squeeze=False)[:, 0]
    for axes, clip in zip(all_axes, report.clips, strict=True):
        times = {reader: result.median_s for reader, result in clip.readers.items() if result.median_s is not None}
        colours = [_OURS if Reader(reader).is_ours else _OTHERS for reader in times]
        bars = axes.barh(list(times), [1000 * seconds for seconds in times.values()], color=colours)
        axes.bar_label(bars, fmt="%.0f ms", padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{clip.num_frames} frames of {clip.name}, {clip.codec}", fontsize=9, loc="left")
    machine = report.hardware
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    lines = (f"{machine.cpu}, {machine.cores} cores; baseline: {report.baseline}", versions, *wrap(report.command, 180))
    figure.supxlabel("\n".join(lines), fontsize=6, x=0.01, ha="left")
    figure.savefig(path)
