"""What `bench first-token` says: a row for each clip, and its first round as lanes over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from vidspec_service.bench.common.report import Picture, Report, Row, column, table
from vidspec_service.bench.first_token.run import ClipTimes, FirstToken, Stage

_COLOURS = {
    Stage.UPLOAD: "#d9d9d9",
    Stage.DECODE: "#7f9f3f",
    Stage.QUEUE: "#f0f0f0",
    Stage.TOWER: "#e08e45",
    Stage.PREFILL: "#1f5f8b",
}
_LANE = 0.8


def clip_row(times: ClipTimes) -> Row:
    """Medians over all requests; `over_slowest` is what waiting for one stage after the other costs."""
    every = [each for one in times.rounds for each in one]

    def middle(figure: Callable[[FirstToken], float]) -> float:
        return median(map(figure, every))

    ends = [max(each.sent_s + each.seconds for each in one) for one in times.rounds]
    return {
        "clip": times.clip,
        "at_once": times.num_at_once,
        "frames": times.num_frames,
        "first_token_s": middle(lambda each: each.seconds),
        "slowest_request_s": max(each.seconds for each in every),
        **{f"{stage}_s": median(each.stage_s(stage) for each in every) for stage in Stage},
        "over_slowest": middle(lambda each: each.seconds / each.slowest_s),
        "answers_per_s": times.num_at_once / median(ends),
    }


def first_token_report(found: Sequence[ClipTimes], models: str) -> Report:
    """Figures, table and picture of what was measured."""
    rows, alone = [clip_row(times) for times in found], 1.0
    for row in rows:  # each clip's own row of one request at a time comes first
        alone = row["answers_per_s"] if row["at_once"] == 1 else alone
        row["over_one_by_one"] = row["answers_per_s"] / alone
    columns = {
        "clip": column("clip"),
        "at once": column("at_once"),
        "frames": column("frames"),
        "first token": column("first_token_s", "{:.0f}", 1000),
        "slowest": column("slowest_request_s", "{:.0f}", 1000),
        **{stage.value: column(f"{stage}_s", "{:.0f}", 1000) for stage in Stage},
        "over stage": column("over_slowest", "{:.2f}x"),
        "answers/s": column("answers_per_s", "{:.2f}"),
        "over 1 by 1": column("over_one_by_one", "{:.2f}x"),
    }
    height = sum(1.0 + 0.25 * _num_lanes(times) for times in found)
    return Report(
        bench="first-token",
        baseline="the slowest stage alone; answers a second: of one request after the other",
        subject=models,
        facts={"models": models, "requests": f"{len(found[0].rounds)} rounds, one token each, every file new"},
        figures={"clips": rows, "rounds": found},
        body=[
            table("Time to the first token over HTTP, medians in ms", columns, rows),
            "slowest: of all requests; upload: with the way back; decode: with the wait for a decoder; over stage: the",
            "first token over the slowest stage before it; over 1 by 1: answers a second, at once over alone",
        ],
        pictures={"plot": Picture(size=(9, height), draw=lambda figure: _draw(figure, found))},
    )


def _num_lanes(times: ClipTimes) -> int:
    return 2 if times.num_at_once == 1 else times.num_at_once


def _draw(figure: Any, found: Sequence[ClipTimes]) -> None:
    """Each clip's first round: of one request both workers' lanes, of several a lane each."""
    heights = [1.0 + 0.25 * _num_lanes(times) for times in found]
    all_axes = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, times in zip(all_axes, found, strict=True):
        for lane, request in enumerate(times.rounds[0]):
            for span in request.spans:
                is_beside = span.worker == "draft"
                if is_beside and times.num_at_once > 1:
                    continue
                bar = (1000 * (request.sent_s + span.start_s), 1000 * (span.end_s - span.start_s))
                place = (lane + is_beside - _LANE / 2, _LANE)
                axes.broken_barh([bar], place, color=_COLOURS[span.stage], edgecolor="white", linewidth=0.3)
        if times.num_at_once == 1:
            axes.set_yticks((0, 1), ("target", "draft"))
        else:
            axes.set_yticks(())
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(f"{times.clip}: {times.num_at_once} at once, {times.num_frames} frames", fontsize=9, loc="left")
        axes.set_xlabel("ms", fontsize=8)
    handles = [_patch(stage) for stage in Stage if stage is not Stage.QUEUE]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)


def _patch(stage: Stage) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=_COLOURS[stage], label=stage.value)
