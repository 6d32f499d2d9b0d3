"""The report as rich tables and lines, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from vidspec_service.bench.identity import Fork
from vidspec_service.bench.options import Mode
from vidspec_service.bench.report import ModeResult, SpeedReport
from vidspec_service.bench.roofline import SyntheticFacts

_MOST_FORKS = 10
_QUIET_LOAD = 0.3  # per core
_DASH = "-"
_COLUMNS = (
    "tokens/s",
    "vs off",
    "95 %",
    "all-in tok/s",
    "TTFT ms",
    "alpha",
    "accepted",
    "predicted",
    "of it",
    "idle t/d",
)


def renderables(report: SpeedReport) -> Iterator[RenderableType]:
    """Facts first, then the modes, then what explains them."""
    yield from _heading(report)
    yield _modes_table(report)
    yield _costs_table(report)
    if report.synthetic is not None:
        yield _roofline_table(report.synthetic)
        yield from (f"note      {note}" for note in report.synthetic.notes)
    yield from _closing(report)


def _heading(report: SpeedReport) -> Iterator[str]:
    machine = report.hardware
    yield f"hardware  {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {' '.join(machine.flags)}"
    for device, name in machine.accelerators.items():
        yield f"          {device} {name}"
    yield "versions  " + ", ".join(f"{name} {value}" for name, value in report.versions.items())
    for role, facts in report.models.items():
        yield f"{role:<10}{facts.model}, {facts.device} {facts.dtype}, {facts.threads} threads"
    law = report.sampling
    sampling = f"temperature {law.temperature:g}, seed {law.seed}" if law.temperature else "greedy"
    at_once = f", {report.concurrency} at once" if report.concurrency > 1 else ""
    yield f"prompts   {report.prompts} x {report.task}, at most {report.max_tokens} tokens, {sampling}{at_once}"
    random = report.synthetic
    if random is not None:
        yield f"synthetic {random.shape}: {random.video_tokens} video tokens, acceptance {random.acceptance:g} imposed"
    yield f"baseline  {report.baseline}"
    yield f"command   {report.command}"


def _modes_table(report: SpeedReport) -> Table:
    table = Table(title="Speed by mode", title_justify="left")
    table.add_column("mode")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for mode, result in report.modes.items():
        table.add_row(mode, *_cells(result))
    return table


def _cells(result: ModeResult) -> tuple[str, ...]:
    interval = result.speedup_interval
    idle = [result.workers[role].idle_ratio for role in ("target", "draft") if role in result.workers]
    return (
        f"{result.tokens_per_s:.1f}",
        _number(result.speedup_vs_off, "{:.2f}x"),
        f"{interval[0]:.2f}..{interval[1]:.2f}" if interval else _DASH,
        f"{result.throughput_tokens_per_s:.1f}",
        f"{1000 * result.ttft_s:.0f}",
        _number(result.acceptance_rate, "{:.3f}"),
        _number(result.mean_accepted_tokens, "{:.2f}"),
        _number(result.predicted_speedup, "{:.2f}x"),
        _number(result.fraction_of_prediction, "{:.0%}"),
        " / ".join(_number(ratio, "{:.0%}") for ratio in idle) or _DASH,
    )


def _costs_table(report: SpeedReport) -> Table:
    costs = report.costs
    title = f"One forward alone, median ms, {costs.context} rows in the cache"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    rows = sorted(costs.target.seconds)
    for num_rows in rows:
        table.add_column(f"T({num_rows})", justify="right", no_wrap=True)
    named = {"target beside a draft": costs.target, "target with all cores": costs.alone, "draft": costs.draft}
    for name, forwards in named.items():
        if forwards is not None:
            cells = (_number(forwards.seconds.get(num_rows), "{:.3f}", scale=1000) for num_rows in rows)
            table.add_row(f"{name} ({forwards.threads} threads)", *cells)
    return table


def _roofline_table(facts: SyntheticFacts) -> Table:
    table = Table(title="One row's bytes over the bandwidth of a large copy", title_justify="left")
    table.add_column("model")
    for name in ("weights GB", "KV GB", "GB/s", "bytes ms", "T(1) ms", "of roofline", "T(1) / weights"):
        table.add_column(name, justify="right", no_wrap=True)
    for role, line in facts.rooflines.items():
        table.add_row(
            role,
            f"{line.weight_bytes / 1e9:.3f}",
            f"{line.cache_bytes / 1e9:.3f}",
            f"{line.bandwidth / 1e9:.0f}",
            f"{1000 * (line.weight_bytes + line.cache_bytes) / line.bandwidth:.3f}",
            f"{1000 * line.step_s:.3f}",
            f"{line.fraction:.0%}",
            f"{line.over_weights:.2f}x",
        )
    return table


def _closing(report: SpeedReport) -> Iterator[str]:
    for mode, result in report.modes.items():
        steps = [
            f"{role} {1000 * use.forwards.median_s:.3f} ms ({use.forwards.mean_rows:.1f} rows)"
            for role, use in result.workers.items()
            if use.forwards is not None
        ]
        if steps:
            yield f"steps in the run, {mode}: {', '.join(steps)}"
    trip = report.channel_round_trip
    yield f"c = T_target(1) / T_draft = {_number(report.cost_ratio, '{:.2f}')}"
    yield f"channel round trip: p50 {1000 * trip.p50_s:.3f} ms, p99 {1000 * trip.p99_s:.3f} ms ({trip.num_exchanges})"
    yield f"cores kept busy by workers out of turn: {report.idle_workers_cpu:.3f}"
    if report.load_average_before > _QUIET_LOAD * report.hardware.cores:
        yield (
            f"WARNING: load average {report.load_average_before:.2f} on {report.hardware.cores} cores before the run: "
            "others were at work, these timings are not to be trusted"
        )
    yield f"identical ids: {_verdict(report.identical)}; equal to hf: {_verdict(report.identical_to_hf)}"
    for fork in report.forks[:_MOST_FORKS]:
        if fork.mode is not Mode.HF or report.identical_to_hf is not None:
            yield _fork_line(fork)
    if len(report.forks) > _MOST_FORKS:
        yield f"  ... {len(report.forks)} forks in all; the JSON file lists them"


def _fork_line(fork: Fork) -> str:
    return (
        f"  fork: prompt {fork.prompt}, {fork.mode} against {fork.reference}, "
        f"token {fork.position}: {fork.found} for {fork.expected}"
    )


def _verdict(value: bool | None) -> str:
    return {True: "yes, 100 %", False: "NO", None: "not compared"}[value]


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return form.format(value * scale) if value is not None else _DASH
