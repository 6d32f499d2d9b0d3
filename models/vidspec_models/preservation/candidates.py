"""Candidates: the cells of a prompt's videos from which a draft's are chosen, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.prompt import is_first_frame

_VALUES_AT_ONCE = 2**18  # feature values compared at once: a megabyte stays in a processor's cache
_VALUES_ON_A_GPU = 2**24

NEIGHBOURHOOD = tuple(product((-1, 0, 1), (-1, 0, 1)))  # steps (down, right) to the 3 x 3 places around and at a cell


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The C cells of a prompt's videos, and how many of them may stay.

    The cells are in F frames of R x S places each. The last row and column have no cells, so a step beyond a frame's
    edge finds none. Frames of different videos are never neighbours in time.
    """

    features: Tensor  # [C, hidden], projected
    frames: Tensor  # int64 [C]: frame index, counted without gaps
    slots: Tensor  # int64 [C]: place within the frame, row * S + column
    times: Tensor  # int64 [F], increasing: neighbours are 1 apart, frames of different videos more than CLIP_GAP
    shape: tuple[int, int]  # R, S
    budget: int
    seed: int

    @classmethod
    def of(cls, features: Tensor, places: Tensor, budget: int = 0, seed: int = 0) -> Candidates:
        """`places` are int64 [C, 3]: (frame, row, column) in reading order, with at least one cell."""
        times, frames = places[:, 0].unique(return_inverse=True)
        rows, columns = int(places[:, 1].max()) + 2, int(places[:, 2].max()) + 2
        return cls(
            features=features,
            frames=frames,
            slots=places[:, 1] * columns + places[:, 2],
            times=times,
            shape=(rows, columns),
            budget=budget,
            seed=seed,
        )

    @property
    def num_cells(self) -> int:
        return len(self.frames)

    @property
    def num_frames(self) -> int:
        return len(self.times)

    @property
    def is_first(self) -> Tensor:
        """bool [F]: whether a frame begins a video."""
        return is_first_frame(self.times)

    @cached_property
    def units(self) -> Tensor:
        """[C, hidden]: the features as `centred` makes them."""
        return centred(self.features)

    @cached_property
    def distinctiveness(self) -> Tensor:
        """float32 [C]: 1 - the mean cosine with the at most 8 neighbours in the cell's frame; 1 if there are none."""
        others, are_there = self.neighbours(self.frames, NEIGHBOURHOOD[:4])  # the other four follow by symmetry
        alike = cosines(self.units, others).masked_fill(~are_there, 0.0)
        total = torch.zeros_like(self.units[:, 0])
        for cosine in alike:
            total += cosine
        for other, cosine in zip(others.flip(0), alike.flip(0), strict=True):
            total.index_add_(0, other, cosine)
        count = are_there.sum(0) + others[are_there].bincount(minlength=self.num_cells)
        return 1.0 - total / count.clamp(min=1)

    def neighbours(self, frames: Tensor, steps: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """For cell c and each of D steps (down, right; at most one place each): the cell there in frame `frames[c]`.

        `frames` is int64 [C]. Returns the found cells' numbers, int64 [D, C], and whether a cell exists there, bool
        [D, C]; if not, the number is meaningless. Uses binary search: in a table of all places every frame would be as
        high as the highest and as wide as the widest frame.
        """
        rows, columns = self.shape
        numbers = self.frames * (rows * columns) + self.slots
        offsets = self.slots.new_tensor([down * columns + right for down, right in steps])
        wanted = frames * (rows * columns) + self.slots + offsets[:, None]
        found = torch.searchsorted(numbers, wanted).clamp(max=self.num_cells - 1)
        return found, numbers[found] == wanted


def centred(features: Tensor) -> Tensor:
    """[C, hidden] minus the mean of all cells, each then scaled to unit length, float32.

    Without centring, the component that all cells share dominates every cosine, and objects dominate the mean of their
    neighbourhood: then the background beside them looks distinct.
    """
    features = features.float()
    return functional.normalize(features - features.mean(0), dim=-1)


def cosines(units: Tensor, others: Tensor) -> Tensor:
    """float32 [D, C]: cosines of each of `units` [C, hidden] with D others, numbered by `others` int64 [D, C]."""
    values_at_once = _VALUES_AT_ONCE if units.device.type == "cpu" else _VALUES_ON_A_GPU
    at_once = max(1, values_at_once // (others.shape[0] * units.shape[1]))
    parts = zip(units.split(at_once), others.split(at_once, 1), strict=True)
    return torch.cat([torch.linalg.vecdot(mine, functional.embedding(theirs, units)) for mine, theirs in parts], 1)
