"""The report of `bench compression`: from scored answers to a table for each number of frames, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import Any

from rich.console import RenderableType

from vidspec_service.bench.common.bootstrap import difference, estimate, whiskers
from vidspec_service.bench.common.environment import Placement
from vidspec_service.bench.common.report import Plot, Report, Row, column, table
from vidspec_service.bench.compression.options import CompressionOptions, Method
from vidspec_service.bench.compression.run import ConfigResult, Score

_COLOURS = {
    Method.NONE: "#555555", Method.RANDOM: "#bbbbbb", Method.UNIFORM: "#a39081", Method.TTM: "#1f5f8b",
    Method.DYCOKE: "#e08e45", Method.VIDCOM2: "#5a9367", Method.V_CAST: "#8e4585", Method.EARLYTOM: "#3b8ea5",
}  # fmt: skip
_MIB = 2**20


def results(measured: Sequence[ConfigResult]) -> list[Row]:
    """One row of results for each configuration, in the given order."""
    frames_of = attrgetter("config.frames")
    return [_result(one, [other for other in measured if frames_of(other) == frames_of(one)]) for one in measured]


def _result(one: ConfigResult, beside: Sequence[ConfigResult]) -> Row:
    """Times are of captions: medians over clips, except the time per token, which is total time over total tokens.

    `request_s` is prepare, prefill and a caption of the mean length over `beside`, all configurations with as many
    frames. Figures relative to the baseline (accuracy change, speedup, KV ratio) are None for the baseline itself.
    """
    config, captions = one.config, {key: [each[key] for each in one.captions] for key in one.captions[0]}
    base = next((other for other in beside if other.config.method is Method.NONE and other is not one), None)
    length = fmean(caption["num_tokens"] for other in beside for caption in other.captions)
    total, scores = sum(one.scores(), Score()), captions["score"]
    found = {
        "compression": config.label,
        "frames": config.frames,
        "ratio": config.ratio,
        "hide_ratio": config.dycoke and config.dycoke.hide_ratio,
        "layer": config.dycoke and config.dycoke.layer,
        "accuracy": total.rate,  # of questions and caption facts together
        "accuracy_change": None,
        "accuracy_change_interval": None,
        "question_accuracy": sum(one.questions, Score()).rate,
        "caption_fact_accuracy": sum(scores, Score()).rate,
        "captions_all_right": fmean(score.right == score.asked for score in scores),
        "num_scored": total.asked,
        "prepare_s": median(captions["prepare_s"]),
        "prefill_s": median(captions["prefill_s"]),
        "time_per_output_token_s": _token_s(one.captions),
        "request_s": _request_s(one.captions, length),
        "speedup": None,
        "kv_bytes": round(median(captions["stored_bytes"])),
        "kv_ratio": None,
        "kv_attended_bytes": round(median(captions["attended_bytes"])),
        "peak_rss_bytes": max(captions["peak_bytes"]),
        "prompt_tokens": fmean(captions["prompt_tokens"]),
        "video_tokens": fmean(captions["video_tokens"]),
        "output_tokens": fmean(captions["num_tokens"]),
    }
    if base is not None:
        pairs = zip(one.scores(), base.scores(), strict=True)
        change = estimate(difference, [(a.right, a.asked, b.right, b.asked) for a, b in pairs])
        found |= {"accuracy_change": change.value, "accuracy_change_interval": change.interval}
        found["speedup"] = _request_s(base.captions, length) / found["request_s"]
        found["kv_ratio"] = median(caption["stored_bytes"] for caption in base.captions) / found["kv_bytes"]
    return found


def _token_s(captions: Sequence[Row]) -> float | None:
    seconds: float = sum(caption["decode_s"] for caption in captions)
    steps = sum(caption["num_tokens"] - 1 for caption in captions)
    return seconds / steps if steps else None


def _request_s(captions: Sequence[Row], length: float) -> float:
    before: float = median(caption["prepare_s"] + caption["prefill_s"] for caption in captions)
    return before + (_token_s(captions) or 0.0) * (length - 1)


def compression_report(
    options: CompressionOptions, measured: Sequence[ConfigResult], placement: Placement, model: str, threads: int
) -> Report:
    """Figures, tables and plot of the measurements."""
    rows = results(measured)
    return Report(
        bench="compression",
        baseline="none: the same target, prompt and seeds without compression, at as many frames",
        placements=[placement],
        facts={
            "target": f"{model}, {placement.device} {placement.dtype}, {threads} threads, alone and greedy",
            "clips": f"{options.num_clips}: a caption of at most {options.max_tokens} tokens "
            "and every question for each",
        },
        figures={
            **placement.facts(model, threads),
            "clips": options.num_clips,
            "max_tokens": options.max_tokens,
            "results": rows,
        },
        body=list(_body(rows)),
        plots={"plot": Plot(size=(9, 1.2 + 3.2 * len(options.frames)), draw=lambda figure: _draw(figure, rows))},
    )


def _body(rows: Sequence[Row]) -> Iterator[RenderableType]:
    columns = {
        "compression": column("compression"),
        "tokens": column("video_tokens", "{:.0f}"),
        "accuracy": column("accuracy", "{:.3f}"),
        "change, points": column("accuracy_change", "{:+.1f}", 100, with_interval=True),
        "first ms": lambda row: f"{1000 * row['prepare_s']:.0f}+{1000 * row['prefill_s']:.0f}",
        "ms/token": column("time_per_output_token_s", "{:.1f}", 1000),
        "request s": column("request_s", "{:.2f}"),
        "faster": column("speedup", "{:.2f}x"),
        "KV MiB": column("kv_bytes", "{:.1f}", 1 / _MIB),
        "less": column("kv_ratio", "{:.2f}x"),
        "read": column("kv_attended_bytes", "{:.1f}", 1 / _MIB),
        "RSS MiB": column("peak_rss_bytes", "{:.0f}", 1 / _MIB),
    }
    for frames in dict.fromkeys(row["frames"] for row in rows):
        yield table(f"{frames} frames", columns, [row for row in rows if row["frames"] == frames])
    yield "change: with 95 % interval over clips; first: tower + prefill; request: with a caption of one common length"
    yield "read: KV that the last token attends to; RSS: the process's peak while captioning, including the model"


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    """Draw accuracy over request time and over KV bytes; bars are the 95 % interval of the accuracy change."""
    numbers = list(dict.fromkeys(row["frames"] for row in rows))
    grid = figure.subplots(len(numbers), 2, squeeze=False, sharey="row")
    for (left, right), frames in zip(grid, numbers, strict=True):
        lines = [row for row in rows if row["frames"] == frames]
        _draw_lines(left, lines, "request_s", 1)
        _draw_lines(right, lines, "kv_bytes", 1 / _MIB)
        left.set(xlabel="seconds per request", ylabel=f"accuracy at {frames} frames")
        right.set_xlabel("MiB of keys and values")
    grid[0][0].legend()


def _draw_lines(axes: Any, lines: Sequence[Row], key: str, scale: float) -> None:
    for method, colour in _COLOURS.items():
        chosen = [line for line in lines if line["compression"].split()[0] == method]
        across, heights = [scale * line[key] for line in chosen], [line["accuracy"] for line in chosen]
        spans = [whiskers(line["accuracy_change"] or 0.0, line["accuracy_change_interval"]) for line in chosen]
        errors = list(zip(*spans, strict=True)) or None
        axes.errorbar(across, heights, errors, fmt="o-", color=colour, label=method.value, capsize=2, elinewidth=0.8)
        for line in chosen if method is not Method.NONE else []:
            below = (4, -11) if method is Method.DYCOKE else (4, 5)
            style = {"textcoords": "offset points", "fontsize": 7, "color": colour}
            axes.annotate(f"{line['ratio']:.0%}", (scale * line[key], line["accuracy"]), below, **style)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
