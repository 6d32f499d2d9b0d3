"""Acceptance over the pruned share, a line a strategy; and the draft's start, with and without waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vidspec_service.bench.pruning.report import ALL_TASKS, PruningReport

_LEVELS = {"none": "all video tokens", "blind": "no video tokens"}
_EMPHASIS = "hippo"
_OURS: Any = {"linewidth": 2.8, "markersize": 5, "zorder": 3}
_OTHERS: Any = {"linewidth": 1.2, "markersize": 3}
_SPANS = {"tower": "#9bb7c9", "prefill": "#1f5f8b", "prefill again": "#e08e45"}


def save_plot(report: PruningReport, path: Path) -> None:
    """Draw and write; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    acceptance, lanes = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_acceptance(acceptance, report)
    _draw_time_line(lanes, report)
    machine = report.hardware
    models = ", ".join(f"{role} {facts.model} {facts.device} {facts.dtype}" for role, facts in report.models.items())
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    signature = (
        f"{machine.cpu}, {machine.cores} cores; {models}; {report.clips} clips",
        f"{versions}; baseline: {report.baseline}",
        report.command,
    )
    figure.supxlabel("\n".join(signature), fontsize=6, x=0.01, ha="left")
    figure.savefig(path)


def _draw_acceptance(axes: Any, report: PruningReport) -> None:
    """Ratios stand at equal distances, in their order: what matters happens between 0.9 and 0.95."""
    overall = [result for result in report.results if result.task == ALL_TASKS]
    shown = sorted({result.ratio for result in overall if result.strategy not in _LEVELS})
    for strategy in dict.fromkeys(result.strategy for result in overall):
        rows = [result for result in overall if result.strategy == strategy]
        if strategy in _LEVELS:
            height = rows[0].acceptance_rate
            axes.axhline(height, color="grey", linestyle="--", linewidth=1)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            axes.annotate(_LEVELS[strategy], (1, height), (-4, 3), fontsize=8, color="dimgrey", **place)
            continue
        places, rates = [shown.index(row.ratio) for row in rows], [row.acceptance_rate for row in rows]
        style = _OURS if strategy == _EMPHASIS else _OTHERS
        axes.plot(places, rates, marker="o", label=strategy, **style)
        if strategy == _EMPHASIS:
            axes.fill_between(places, [row.ci_low for row in rows], [row.ci_high for row in rows], alpha=0.15)
    axes.set_xticks(range(len(shown)), [f"{100 * ratio:g} %" for ratio in shown])
    axes.set_xlabel("of the video's tokens left out of the draft's prompt")
    axes.set_ylabel("share of the target's tokens that the draft guesses")
    axes.set_title("Acceptance of the pruned draft, all tasks (band: 95 %, over clips)", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 0.06))


def _draw_time_line(axes: Any, report: PruningReport) -> None:
    clip, line = report.long_clip, report.long_clip.time_line
    scores = line.relevance_s
    lanes = {
        "target": [
            (0.0, clip.target_prepare_s, "tower"),
            (clip.target_prepare_s, line.target_first_token_s, "prefill"),
        ],
        "draft": [
            (0.0, clip.draft_prepare_s, "tower"),
            (clip.draft_prepare_s, line.draft_ready_s, "prefill"),
            (max(scores, line.draft_ready_s), line.draft_refined_s, "prefill again"),
        ],
        "draft, had\nit waited": [
            (0.0, clip.draft_prepare_s, "tower"),
            (max(scores, clip.draft_prepare_s), line.draft_ready_if_it_waited_s, "prefill"),
        ],
    }
    for height, spans in enumerate(lanes.values()):
        for start, end, what in spans:
            axes.broken_barh([(1000 * start, 1000 * (end - start))], (height - 0.3, 0.6), color=_SPANS[what])
    axes.axvline(1000 * line.target_first_token_s, color="black", linewidth=0.8)
    for what, colour in _SPANS.items():
        axes.broken_barh([], (0, 0), color=colour, label=what)
    axes.legend(fontsize=8, loc="center")
    axes.set_yticks(range(len(lanes)), list(lanes), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms after both took the request up; line: first token", fontsize=8)
    axes.set_title(f"When the draft can propose, {clip.frames} frames", fontsize=9)
