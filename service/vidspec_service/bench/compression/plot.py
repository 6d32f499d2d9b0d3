"""The report as a picture: accuracy against time of a request and against KV bytes, one line of points per method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vidspec_service.bench.compression.options import Method
from vidspec_service.bench.compression.report import CompressionReport
from vidspec_service.bench.compression.results import CompressionResult

_COLOURS = {Method.NONE: "#555555", Method.TTM: "#1f5f8b", Method.DYCOKE: "#e08e45"}


def save_plot(report: CompressionReport, path: Path) -> None:
    """One row of pictures per number of frames; bars are the 95 % interval of the change against `none`."""
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
        across, heights = [x for x, _ in chosen], [line.accuracy for _, line in chosen]
        spans = list(zip(*(_span(line) for _, line in chosen), strict=True)) or None
        axes.errorbar(across, heights, spans, fmt="o-", color=colour, label=method.value, capsize=2, elinewidth=0.8)
        for x, line in chosen:
            if method is not Method.NONE:
                below = (4, -11) if method is Method.DYCOKE else (4, 5)
                label = f"K={line.merge_ratio:g}"
                axes.annotate(label, (x, line.accuracy), below, textcoords="offset points", fontsize=7, color=colour)
    axes.set_xlabel(name)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)


def _span(line: CompressionResult) -> tuple[float, float]:
    """How far the 95 % interval of the change goes below and above."""
    if line.accuracy_change is None or line.accuracy_change_interval is None:
        return 0.0, 0.0
    low, high = line.accuracy_change_interval
    return line.accuracy_change - low, high - line.accuracy_change
