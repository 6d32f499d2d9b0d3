"""Plots of `bench pruning`: acceptance over the pruned share, when the draft is ready, and what each strategy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidspec_models.inputs import pruned
from vidspec_service.bench.common.report import Row
from vidspec_service.bench.pruning.judging import Answered, LoadedPair, kept_rows
from vidspec_service.bench.pruning.options import ClipPrompt, Setting

_LEVELS = {"none": "all video tokens", "blind": "no video tokens"}
_EMPHASIS = "hippo"
_OURS: Any = {"linewidth": 2.8, "markersize": 5, "zorder": 3}
_OTHERS: Any = {"linewidth": 1.2, "markersize": 3}
_SPANS = {"tower": "#9bb7c9", "prefill": "#1f5f8b", "prefill again": "#e08e45"}
_DARKENED = 0.25
_GAP = 4  # pixels between frames
_SCALE = 2
_MOST_COLUMNS = 8


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


def draw_overlays(
    models: LoadedPair, asked: ClipPrompt, answer: Answered, settings: Sequence[Setting], folder: Path
) -> None:
    """Write one picture per setting, `STRATEGY-RATIO.png`, with all frames of the clip in reading order."""
    from matplotlib.image import imsave

    folder.mkdir(parents=True, exist_ok=True)
    whole = models.prompt("draft", asked)
    places = whole.grid.cpu().numpy()
    for setting in settings:
        grid = pruned(whole, kept_rows(setting, whole, answer, asked.clip)).grid
        picture = overlay(asked.video.frames, places, grid.cpu().numpy())
        imsave(folder / f"{setting.strategy.value}-{setting.ratio:g}.png", picture)


def overlay(frames: NDArray[np.uint8], places: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.uint8]:
    """One picture [height, width, 3] of frames [T, H, W, 3] side by side; cells that are not kept are darkened.

    places, kept: (frame, row, column) of all rows and of the kept rows; rows that are not cells have negative numbers.
    Frames that share a cell (in models that merge pairs of frames) are all drawn with it.
    """
    num_frames, num_rows, num_columns = places.max(axis=0) + 1
    is_kept = np.zeros((num_frames, num_rows, num_columns), bool)
    is_kept[tuple(kept[(kept >= 0).all(axis=1)].T)] = True
    return _tiled([_drawn(frame, is_kept[index * num_frames // len(frames)]) for index, frame in enumerate(frames)])


def _drawn(frame: NDArray[np.uint8], is_kept: NDArray[np.bool_]) -> NDArray[np.uint8]:
    height, width = frame.shape[:2]
    rows = np.arange(height) * is_kept.shape[0] // height
    columns = np.arange(width) * is_kept.shape[1] // width
    brightness = np.where(is_kept[rows[:, None], columns], 1.0, _DARKENED)
    return (frame * brightness[..., None]).astype(np.uint8).repeat(_SCALE, 0).repeat(_SCALE, 1)


def _tiled(pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    height, width = pictures[0].shape[:2]
    num_columns = min(len(pictures), _MOST_COLUMNS)
    num_rows = -(-len(pictures) // num_columns)
    sheet = np.full((num_rows * (height + _GAP) - _GAP, num_columns * (width + _GAP) - _GAP, 3), 255, np.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // num_columns * (height + _GAP), index % num_columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = picture
    return sheet
