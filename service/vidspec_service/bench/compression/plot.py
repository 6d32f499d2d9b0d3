"""The report as a picture: accuracy against time of a request and against KV bytes, one line of points per method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vidspec_service.bench.compression.options import Method
from vidspec_service.bench.compression.report import CompressionReport
from vidspec_service.bench.compression.results import CompressionResult

_COLOURS = {Method.NONE: "#555555", Method.TTM: "#1f5f8b", Method.DYCOKE: "#e08e45"}


def save_plot(report: CompressionReport, path: Path) -> None:
    """One row of pictures per number of frames."""
    from matplotlib.figure import Figure

    numbers = list(dict.fromkeys(result.frames for result in report.results))
    figure = Figure(figsize=(9, 1.2 + 3.2 * len(numbers)), dpi=150, layout="constrained")
    grid: Any = figure.subplots(len(numbers), 2, squeeze=False, sharey="row")
    for row, frames in zip(grid, numbers, strict=True):
        lines = [result for result in report.results if result.frames == frames]
        _draw(row[0], lines, [line.request_s for line in lines], "seconds per request")
        _draw(row[1], lines, [line.kv_bytes / 2**20 for line in lines], "MiB of keys and values")
        row[0].set_ylabel(f"accuracy at {frames} frames")
    grid[0][0].legend(fontsize=8)
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    signature = (
        f"{report.hardware.cpu}, {report.hardware.cores} cores; {report.model} {report.device} {report.dtype}",
        f"{versions}; {report.clips} clips; baseline: {report.baseline}",
        report.command,
    )
    figure.supxlabel("\n".join(signature), fontsize=6, x=0.01, ha="left")
    figure.savefig(path)


def _draw(axes: Any, lines: list[CompressionResult], places: list[float], name: str) -> None:
    for method, colour in _COLOURS.items():
        chosen = [(x, line) for x, line in zip(places, lines, strict=True) if line.compression.split()[0] == method]
        heights = [line.accuracy for _, line in chosen]
        axes.plot([x for x, _ in chosen], heights, "o-", color=colour, label=method.value)
        for x, line in chosen:
            if method is not Method.NONE:
                label = f"{line.merge_ratio:g}"
                axes.annotate(label, (x, line.accuracy), (3, 3), textcoords="offset points", fontsize=7)
    axes.set_xlabel(name)
    axes.set_xlim(left=0)
    axes.margins(y=0.2)
