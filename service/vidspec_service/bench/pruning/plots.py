"""Plots of `bench pruning`: acceptance over the pruned share, and when the draft is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vidspec_service.bench.common.report import Row

_LEVELS = {"none": "all video tokens", "blind": "no video tokens"}
_EMPHASIS = "hippo"
_OURS: Any = {"linewidth": 2.8, "markersize": 5, "zorder": 3}
_OTHERS: Any = {"linewidth": 1.2, "markersize": 3}
_SPANS = {"tower": "#9bb7c9", "prefill": "#1f5f8b", "prefill again": "#e08e45"}


def draw_report(figure: Any, rows: Sequence[Row], clip: Row) -> None:
    """Draw a line per strategy from `rows` (all tasks together), and the time line of the long `clip`."""
    acceptance, lanes = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_acceptance(acceptance, rows)
    _draw_time_line(lanes, clip)


def _draw_acceptance(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the ratios at equal distances, because the important changes happen between 0.9 and 0.95."""
    shown = sorted({row["ratio"] for row in rows if row["strategy"] not in _LEVELS})
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        rates = [row["acceptance_rate"] for row in mine]
        if strategy in _LEVELS:
            axes.axhline(rates[0], color="grey", linestyle="--", linewidth=1)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            axes.annotate(_LEVELS[strategy], (1, rates[0]), (-4, 3), fontsize=8, color="dimgrey", **place)
            continue
        places = [shown.index(row["ratio"]) for row in mine]
        axes.plot(places, rates, marker="o", label=strategy, **(_OURS if strategy == _EMPHASIS else _OTHERS))
        if strategy == _EMPHASIS and mine[0]["ci_low"] is not None:
            axes.fill_between(places, [row["ci_low"] for row in mine], [row["ci_high"] for row in mine], alpha=0.15)
    axes.set_xticks(range(len(shown)), [f"{100 * ratio:g} %" for ratio in shown])
    axes.set_xlabel("of the video's tokens left out of the draft's prompt")
    axes.set_ylabel("share of the target's tokens that the draft guesses")
    axes.set_title("Acceptance of the pruned draft, all tasks (band: 95 %, over clips)", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 0.06))


def _draw_time_line(axes: Any, clip: Row) -> None:
    line = clip["time_line"]
    scores, ready, first_token = line["relevance_s"], line["draft_ready_s"], line["target_first_token_s"]
    target_s, draft_s = clip["target_prepare_s"], clip["draft_prepare_s"]
    spans = [
        ("target", "tower", 0.0, target_s),
        ("target", "prefill", target_s, first_token),
        ("draft", "tower", 0.0, draft_s),
        ("draft", "prefill", draft_s, ready),
        ("draft", "prefill again", max(scores, ready), line["draft_refined_s"]),
        ("draft, had\nit waited", "tower", 0.0, draft_s),
        ("draft, had\nit waited", "prefill", max(scores, draft_s), line["draft_ready_if_it_waited_s"]),
    ]
    for lane, what, start, end in spans:
        axes.barh(lane, 1000 * (end - start), 0.6, 1000 * start, color=_SPANS[what], label=what)
    axes.axvline(1000 * first_token, color="black", linewidth=0.8)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles=dict(zip(names, handles, strict=True)).values(), fontsize=8, loc="center")
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms after both took the request up; line: first token", fontsize=8)
    axes.set_title(f"When the draft can propose, {clip['frames']} frames", fontsize=9)
