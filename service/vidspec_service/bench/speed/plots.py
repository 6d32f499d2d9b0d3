"""Pictures of `bench speed`: the modes as bars, and one request's work as two lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vidspec_service.bench.common.report import Row
from vidspec_service.bench.common.samples import Interval
from vidspec_service.bench.speed.activity import Span, within

_COLOURS = {"target": "#1f5f8b", "draft": "#e08e45"}
_ZOOM_FORWARDS = 10
_LANE = 0.8


def draw_speedups(figure: Any, modes: Mapping[str, Row]) -> None:
    """One bar per mode: speed-up over the baseline with its interval, tokens per second written on it."""
    axes = figure.add_subplot()
    for index, row in enumerate(modes.values()):
        height = row["speedup_vs_off"] or 0.0
        low, high = row["speedup_interval"] or (height, height)
        errors = [[max(height - low, 0.0)], [max(high - height, 0.0)]]
        axes.bar(index, height, yerr=errors, capsize=4, color=_COLOURS["target"], width=0.6)
        label = f"{height:.2f}x\n{row['tokens_per_s']:.0f} tok/s"
        axes.annotate(label, (index, max(height, high)), (0, 4), textcoords="offset points", ha="center", va="bottom")
        if row["predicted_speedup"] is not None:
            axes.plot([index - 0.3, index + 0.3], [row["predicted_speedup"]] * 2, "k--", linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(modes)), list(modes))
    axes.set_ylabel("decoding speed relative to off")
    axes.margins(y=0.2)
    axes.set_title("Speed by mode (dashed: predicted by the speed model; bars: 95 % interval over prompts)", fontsize=9)


def draw_timeline(figure: Any, lanes: Mapping[str, Sequence[Span]], window: Interval) -> None:
    """Work of both workers from a request's first to its last token, above; its middle enlarged, below."""
    whole, zoom = figure.subplots(2, 1)
    forwards = within(lanes["target"], window)  # of which a few are enlarged
    middle = forwards[max((len(forwards) - _ZOOM_FORWARDS) // 2, 0) :][:_ZOOM_FORWARDS]
    zoomed = (middle[0][0], middle[-1][1]) if len(forwards) > _ZOOM_FORWARDS else window
    for axes, (start, stop), title in (
        (whole, window, "One request in mode parallel, first to last token"),
        (zoom, zoomed, "Enlarged; numbers are rows of a forward"),
    ):
        for height, role in enumerate(("draft", "target")):
            work = within(lanes[role], (start, stop))
            bars = [(1000 * (begin - window[0]), 1000 * (end - begin)) for begin, end, _ in work]
            place = (height - _LANE / 2, _LANE)
            axes.broken_barh(bars, place, color=_COLOURS[role], edgecolor="white", linewidth=0.3)
        axes.set_yticks((0, 1), ("draft", "target"))
        axes.set_xlim(1000 * (start - window[0]), 1000 * (stop - window[0]))
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("ms after the first token", fontsize=8)
    for begin, end, num_rows in within(lanes["target"], zoomed):
        at_ms = 1000 * ((begin + end) / 2 - window[0])
        zoom.annotate(str(num_rows), (at_ms, 1), ha="center", va="center", color="white", clip_on=True, fontsize=8)
