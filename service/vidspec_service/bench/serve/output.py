"""The report as tables for a terminal, and as curves: how latencies spread, and what a soaked server held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from vidspec_service.bench.serve.footprint import Footprint
from vidspec_service.bench.serve.report import ServeReport
from vidspec_service.bench.serve.soak import SoakResult
from vidspec_service.bench.serve.statistics import LoadResult, Percentiles

_MIB = 1024 * 1024


def renderables(report: ServeReport) -> Iterator[RenderableType]:
    """Facts, a table for each load, then the soak."""
    machine = report.hardware
    yield f"hardware  {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB"
    yield "versions  " + ", ".join(f"{name} {value}" for name, value in report.versions.items())
    yield f"server    {report.server}: {report.model}; load before the run: {report.load_average_before:.2f}"
    yield "settings  " + ", ".join(f"{name} {value}" for name, value in report.settings.items())
    yield f"baseline  {report.baseline}"
    yield f"command   {report.command}"
    for load in report.loads:
        yield _latencies(load)
        yield from _counts(load)
    if report.soak is not None:
        yield _footprints(report.soak)


def _latencies(load: LoadResult) -> Table:
    title = f"{load.name}: {load.num_requests} requests in {load.duration_s:.1f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("ms")
    for name in ("p50", "p90", "p95", "p99", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = (("first token", load.ttft), ("per token", load.tpot), ("whole answer", load.e2e), ("refusal", load.refusal))
    for name, percentiles in rows:
        if percentiles is not None:
            table.add_row(name, *_milliseconds(percentiles))
    return table


def _milliseconds(of: Percentiles) -> list[str]:
    return [f"{1000 * value:.1f}" for value in (of.p50, of.p90, of.p95, of.p99, of.worst)]


def _counts(load: LoadResult) -> Iterator[str]:
    yield (
        f"offered {load.offered_per_s:.2f}/s, answered {load.answered_per_s:.2f}/s, "
        f"goodput {load.goodput_per_s:.2f}/s, {load.tokens_per_s:.1f} tokens/s"
    )
    yield (
        f"answered {load.num_answered} ({load.num_late} after the deadline), refused {load.num_refused}, "
        f"left early {load.num_left_early}, lost {load.num_lost}"
    )
    if load.errors:
        yield "errors: " + ", ".join(f"{count} x {error}" for error, count in load.errors.items())


def _footprints(soak: SoakResult) -> Table:
    title = f"After {soak.num_warm_up} requests of warm-up, and after {soak.num_requests} more"
    table = Table(title=title, title_justify="left")
    for name in ("", "resident MiB", "processes", "descriptors", "upload files"):
        table.add_column(name, justify="right")
    for name, held in (("before", soak.before), ("after", soak.after)):
        table.add_row(name, *_held(held))
    table.add_row("growth", f"{100 * soak.growth:+.2f} %")
    return table


def _held(held: Footprint) -> list[str]:
    resident = f"{held.resident_bytes / _MIB:.1f}"
    return [resident, str(held.num_processes), str(held.num_descriptors), str(held.num_files)]


def save_plot(report: ServeReport, path: Path) -> None:
    """Cumulative shares over seconds; for a soak, resident memory over requests below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5 if report.soak is None else 8), dpi=150, layout="constrained")
    all_axes = figure.subplots(1 if report.soak is None else 2, 1, squeeze=False)[:, 0]
    for name, outcomes in report.outcomes.items():
        whole = [outcome for outcome in outcomes if outcome.is_complete]
        _draw_shares(all_axes[0], f"{name}: first token", [each.ttft_s for each in whole if each.ttft_s is not None])
        _draw_shares(all_axes[0], f"{name}: whole answer", [each.e2e_s for each in whole])
        refused = [each.e2e_s for each in outcomes if each.status in (429, 503)]
        _draw_shares(all_axes[0], f"{name}: refusal", refused)
    all_axes[0].set_xscale("log")
    all_axes[0].set_xlabel("seconds since the request was due")
    all_axes[0].set_ylabel("share of requests")
    all_axes[0].legend(fontsize=7)
    if report.soak is not None:
        done = [number for number, _ in report.soak.samples]
        all_axes[1].plot(done, [held.resident_bytes / _MIB for _, held in report.soak.samples])
        all_axes[1].set_ylim(bottom=0)
        all_axes[1].set_xlabel("requests ended after warm-up")
        all_axes[1].set_ylabel("resident MiB, all processes")
    machine = report.hardware
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    lines = (f"{machine.cpu}, {machine.cores} cores; {report.model}; {versions}", *wrap(report.command, 180))
    figure.supxlabel("\n".join(lines), fontsize=6, x=0.01, ha="left")
    figure.savefig(path)


def _draw_shares(axes: Any, label: str, values: Sequence[float]) -> None:
    if values:
        shares = [(index + 1) / len(values) for index in range(len(values))]
        axes.step(sorted(values), shares, where="post", label=label)
