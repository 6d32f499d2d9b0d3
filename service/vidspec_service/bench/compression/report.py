"""CompressionReport: all that `bench compression` says; the JSON file, the table and the plot are made from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from vidspec_service.bench.compression.results import CompressionResult
from vidspec_service.bench.facts import Hardware

_DASH = "-"
_MIB = 2**20
_QUIET_LOAD = 0.3  # per core
_COLUMNS = (
    "accuracy",
    "change, points",
    "prefill s",
    "ms/token",
    "request s",
    "faster",
    "KV MiB",
    "less",
    "read",
    "RSS MiB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionReport:
    """Figures of one run."""

    bench: str = "compression"
    created: str
    command: str
    baseline: str
    hardware: Hardware
    versions: Mapping[str, str]
    model: str
    device: str
    dtype: str
    threads: int
    clips: int
    max_tokens: int
    load_average_before: float
    results: tuple[CompressionResult, ...]

    def to_json(self) -> str:
        """As written to the file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.to_json(), encoding="utf-8")


def renderables(report: CompressionReport) -> Iterator[RenderableType]:
    """Facts first, then a table for each number of frames."""
    machine = report.hardware
    yield f"hardware  {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {' '.join(machine.flags)}"
    for device, name in machine.accelerators.items():
        yield f"          {device} {name}"
    yield "versions  " + ", ".join(f"{name} {value}" for name, value in report.versions.items())
    yield f"target    {report.model}, {report.device} {report.dtype}, {report.threads} threads, alone and greedy"
    yield f"clips     {report.clips}: a caption of at most {report.max_tokens} tokens and every question for each"
    yield f"baseline  {report.baseline}"
    yield f"command   {report.command}"
    for frames in dict.fromkeys(result.frames for result in report.results):
        yield _table(frames, [result for result in report.results if result.frames == frames])
    yield "change: with its 95 % interval over clips; request: a caption of one common length; read: KV of a last token"
    yield "RSS: the process's peak while captioning, with the model that it had loaded before"
    if report.load_average_before > _QUIET_LOAD * machine.cores:
        yield (
            f"WARNING: load average {report.load_average_before:.2f} on {machine.cores} cores before the run: "
            "others were at work, these timings are not to be trusted"
        )


def _table(frames: int, lines: list[CompressionResult]) -> Table:
    table = Table(title=f"{frames} frames", title_justify="left")
    table.add_column("compression")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.compression, *_cells(line))
    return table


def _cells(line: CompressionResult) -> tuple[str, ...]:
    return (
        f"{line.accuracy:.3f}",
        _change(line),
        f"{line.prefill_s:.2f}",
        f"{1000 * line.time_per_output_token_s:.1f}",
        f"{line.request_s:.2f}",
        _DASH if line.speedup is None else f"{line.speedup:.2f}x",
        f"{line.kv_bytes / _MIB:.1f}",
        _DASH if line.kv_ratio is None else f"{line.kv_ratio:.2f}x",
        f"{line.kv_attended_bytes / _MIB:.1f}",
        f"{line.peak_rss_bytes / _MIB:.0f}",
    )


def _change(line: CompressionResult) -> str:
    if line.accuracy_change is None:
        return _DASH
    change = f"{100 * line.accuracy_change:+.1f}"
    if line.accuracy_change_interval is None:
        return change
    low, high = line.accuracy_change_interval
    return f"{change} ({100 * low:+.1f}..{100 * high:+.1f})"
