"""CellGrid: where the video rows lie in frames, rows and columns, and which of them have neighbours there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGrid:
    """C cells of F frames of at most R x S places; a place that a video has no cell for is empty."""

    frames: Tensor  # int64 [C], counted without gaps
    slots: Tensor  # int64 [C]: place within the frame, row * S + column
    num_frames: int
    shape: tuple[int, int]  # R, S

    @classmethod
    def of(cls, places: Tensor) -> CellGrid:
        """From int64 [C, 3]: (frame, row, column)."""
        if not len(places):
            empty = places.new_zeros(0)
            return cls(frames=empty, slots=empty, num_frames=0, shape=(0, 0))
        kinds, frames = places[:, 0].unique(return_inverse=True)
        rows, columns = int(places[:, 1].max()) + 1, int(places[:, 2].max()) + 1
        return cls(
            frames=frames,
            slots=places[:, 1] * columns + places[:, 2],
            num_frames=len(kinds),
            shape=(rows, columns),
        )

    @property
    def num_cells(self) -> int:
        return len(self.frames)

    def frame_sizes(self) -> Tensor:
        """int64 [F]: cells of each frame."""
        return torch.bincount(self.frames, minlength=self.num_frames)

    def dense(self, values: Tensor) -> Tensor:
        """[C, ...] in its places: [F, R, S, ...], zeros where there is no cell."""
        rows, columns = self.shape
        spread = values.new_zeros(self.num_frames * rows * columns, *values.shape[1:])
        spread[self.frames * rows * columns + self.slots] = values
        return spread.view(self.num_frames, rows, columns, *values.shape[1:])

    def gathered(self, dense: Tensor) -> Tensor:
        """[F, R, S] back to [C]."""
        return dense.flatten()[self.frames * (self.shape[0] * self.shape[1]) + self.slots]


def neighbours(dense: Tensor, *, with_self: bool) -> Iterator[Tensor]:
    """The 3 x 3 neighbourhood of every place of [F, R, S, ...], one direction after the other; zeros past an edge."""
    trailing = (0, 0) * (dense.dim() - 3)
    padded = functional.pad(dense, (*trailing, 1, 1, 1, 1))
    rows, columns = dense.shape[1:3]
    for down in range(3):
        for right in range(3):
            if with_self or (down, right) != (1, 1):
                yield padded[:, down : down + rows, right : right + columns]
