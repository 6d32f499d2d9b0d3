"""The report as a bar chart, and one request's work as two lanes. matplotlib comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vidspec_service.bench.activity import Span, within
from vidspec_service.bench.report import SpeedReport
from vidspec_service.errors import ConfigError

_COLOURS = {"target": "#1f5f8b", "draft": "#e08e45"}
_ZOOM_FORWARDS = 10
_LANE = 0.8


def require_matplotlib() -> None:
    """Before anything is measured: raises ConfigError naming the remedy."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'vidspec[bench]'")


def save_speedups(report: SpeedReport, path: Path) -> None:
    """One bar per mode: speed-up over the baseline with its interval, tokens per second written on it."""
    figure = _figure(8, 4.8)
    axes = figure.add_subplot()
    for index, result in enumerate(report.modes.values()):
        height = result.speedup_vs_off or 0.0
        low, high = result.speedup_interval or (height, height)
        errors = [[max(height - low, 0.0)], [max(high - height, 0.0)]]
        axes.bar(index, height, yerr=errors, capsize=4, color=_COLOURS["target"], width=0.6)
        label = f"{height:.2f}x\n{result.tokens_per_s:.0f} tok/s"
        axes.annotate(label, (index, max(height, high)), (0, 4), textcoords="offset points", ha="center", va="bottom")
        if result.predicted_speedup is not None:
            axes.plot([index - 0.3, index + 0.3], [result.predicted_speedup] * 2, "k--", linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(report.modes)), list(report.modes))
    axes.set_ylabel("decoding speed relative to off")
    axes.margins(y=0.2)
    axes.set_title("Speed by mode (dashed: predicted by the speed model; bars: 95 % interval over prompts)", fontsize=9)
    _sign(figure, report)
    figure.savefig(path)


def save_timeline(
    lanes: dict[str, Sequence[Span]], window: tuple[float, float], report: SpeedReport, path: Path
) -> None:
    """Work of both workers from a request's first to its last token, above; its middle enlarged, below."""
    figure = _figure(11, 5.2)
    whole, zoom = figure.subplots(2, 1)
    zoomed = zoom_window(within(lanes["target"], window), window)
    for axes, (start, stop), title in (
        (whole, window, "One request in mode parallel, first to last token"),
        (zoom, zoomed, "Enlarged; numbers are rows of a forward"),
    ):
        for height, role in enumerate(("draft", "target")):
            _draw_lane(axes, height, within(lanes[role], (start, stop)), window[0], role)
        axes.set_yticks((0, 1), ("draft", "target"))
        axes.set_xlim(1000 * (start - window[0]), 1000 * (stop - window[0]))
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("ms after the first token", fontsize=8)
    for begin, end, num_rows in within(lanes["target"], zoomed):
        middle = 1000 * ((begin + end) / 2 - window[0])
        zoom.annotate(str(num_rows), (middle, 1), ha="center", va="center", color="white", clip_on=True, fontsize=8)
    _sign(figure, report)
    figure.savefig(path)


def zoom_window(spans: Sequence[Span], window: tuple[float, float]) -> tuple[float, float]:
    """A few target forwards from the middle of the request."""
    if len(spans) <= _ZOOM_FORWARDS:
        return window
    first = (len(spans) - _ZOOM_FORWARDS) // 2
    return spans[first][0], spans[first + _ZOOM_FORWARDS - 1][1]


def _draw_lane(axes: Any, height: int, spans: Sequence[Span], origin: float, role: str) -> None:
    bars = [(1000 * (start - origin), 1000 * (end - start)) for start, end, _ in spans]
    axes.broken_barh(bars, (height - _LANE / 2, _LANE), color=_COLOURS[role], edgecolor="white", linewidth=0.3)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _sign(figure: Any, report: SpeedReport) -> None:
    """Hardware, models, versions, command and baseline, below the picture."""
    machine, models = report.hardware, report.models
    named = ", ".join(
        f"{role} {models[role].model} {models[role].device} {models[role].dtype} x{models[role].threads}"
        for role in ("target", "draft")
        if role in models
    )
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    lines = (
        f"{machine.cpu}, {machine.cores} cores; {named}",
        f"{versions}; {report.prompts} prompts; baseline: {report.baseline}",
        report.command,
    )
    figure.supxlabel("\n".join(lines), fontsize=6, x=0.01, ha="left")
