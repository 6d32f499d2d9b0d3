"""What each strategy keeps, drawn on the frames: kept cells as they are, the others dark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vidspec_models.preservation import find_strategy, kept_of_prompt, pruned
from vidspec_service.bench.pruning.asking import Asked
from vidspec_service.bench.pruning.judging import Answered, LoadedPair, Setting

_DARKENED = 0.25
_GAP = 4  # pixels between frames
_SCALE = 2
_MOST_COLUMNS = 8


def draw_overlays(
    models: LoadedPair, asked: Asked, answer: Answered, settings: Sequence[Setting], folder: Path
) -> None:
    """One picture per setting, `STRATEGY-RATIO.png`, all frames of the clip in reading order."""
    from matplotlib.image import imsave

    folder.mkdir(parents=True, exist_ok=True)
    whole = models.prompt("draft", asked)
    assert whole.grid is not None
    places = whole.grid.cpu().numpy()
    for setting in settings:
        strategy = find_strategy(setting.strategy)
        relevance = answer.relevance.get(strategy.relevance) if strategy.relevance else None
        kept = kept_of_prompt(strategy, min(setting.ratio, 0.99), whole, relevance)
        grid = pruned(whole, kept).grid
        assert grid is not None
        picture = overlay(asked.video.frames, places, grid.cpu().numpy())
        imsave(folder / f"{setting.strategy.value}-{setting.ratio:g}.png", picture)


def overlay(frames: NDArray[np.uint8], places: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.uint8]:
    """One picture [height, width, 3] of frames [T, H, W, 3] side by side; cells that are not kept are darkened.

    places, kept: (frame, row, column) of all rows and of those kept; rows that are no cell are negative. Frames that
    share a cell (models that merge pairs) are all drawn with it.
    """
    num_frames, num_rows, num_columns = places.max(axis=0) + 1
    is_kept = np.zeros((num_frames, num_rows, num_columns), bool)
    is_kept[tuple(kept[(kept >= 0).all(axis=1)].T)] = True
    drawn = [_drawn(frame, is_kept[index * num_frames // len(frames)]) for index, frame in enumerate(frames)]
    return _tiled(drawn)


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
