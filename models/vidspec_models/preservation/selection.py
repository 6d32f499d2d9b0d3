"""Which video rows a draft sees: the cells that a strategy chooses within a budget, and all rows that are not cells.

Everything here changes only the draft's guesses, never the target's text. Sources and formulas: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.preservation.text_queries import SoftmaxOver
from vidspec_models.prompt import NO_CELL, Prompt, is_first_frame

MIN_KEPT = 16  # cells; a clip with fewer is too short to prune
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named way to choose cells. `relevance` says which attention the target must compute for it, if any."""

    name: str
    # Gets the cells and the text's attention, float32 [C] (None: not known); returns the kept cells in any order.
    select: Callable[[Candidates, Tensor | None], Tensor]
    relevance: SoftmaxOver | None = None
    ignores_ratio: bool = False


def num_kept(num_cells: int, ratio: float) -> int:
    """How many of `num_cells` cells stay if a share `ratio` is pruned: at least 16, or all if there are fewer."""
    return min(num_cells, max(MIN_KEPT, int((1.0 - ratio) * num_cells + 1e-9)))


class CellSelector:
    """Chooses the video rows of one prompt that stay; again once the attention of its text is known."""

    @torch.inference_mode()
    def __init__(self, strategy: Strategy, ratio: float, prompt: Prompt, seed: int = 0) -> None:
        """`ratio` is the share of the C cells to prune, in [0, 0.99]; rows that are not cells always stay."""
        features, grid = prompt.embeddings[prompt.is_video], prompt.grid
        self._strategy = strategy
        self._is_cell = (grid != NO_CELL).all(1)
        self._cells = self._is_cell.nonzero()[:, 0]
        budget = num_kept(len(self._cells), 0.0 if strategy.ignores_ratio else ratio)
        self._candidates: Candidates | None = None  # None: everything stays
        if len(self._cells) and (budget < len(self._cells) or strategy.ignores_ratio):
            self._candidates = Candidates.of(features[self._cells], grid[self._cells], budget, seed)

    @torch.inference_mode()
    def kept(self, relevance: Tensor | None = None) -> Tensor:
        """Sorted indices, int64, of the V video rows that stay; relevance is float [V], None while it is not known."""
        if self._candidates is None:
            return torch.arange(len(self._is_cell), device=self._is_cell.device)
        known = None if relevance is None else relevance[self._cells].float().nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
        stays = ~self._is_cell
        stays[self._cells[self._strategy.select(self._candidates, known)]] = True
        return stays.nonzero()[:, 0]


def top_indices(scores: Tensor, budget: int) -> Tensor:
    """Indices of the `budget` largest of [C]; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:budget]


def evenly_spaced(num_all: int, num_wanted: int, device: torch.device) -> Tensor:
    """`num_wanted` different indices below `num_all`, int64, evenly spaced, both ends included."""
    if num_wanted >= num_all:
        return torch.arange(num_all, device=device)
    return torch.from_numpy(np.linspace(0, num_all - 1, max(num_wanted, 0)).round().astype(np.int64)).to(device)


def filled_evenly(chosen: Tensor, num_cells: int, budget: int) -> Tensor:
    """`budget` indices below `num_cells`: those in `chosen`, and the rest of the budget evenly from all other cells.

    The even ones guarantee something of every frame: with m of them, evenly spaced in reading order among L cells, each
    run of ceil((L - 1) / (m - 1)) of these cells has one, and so has every frame with that many of them.
    """
    is_left = torch.ones(num_cells, dtype=torch.bool, device=chosen.device)
    is_left[chosen] = False
    left = is_left.nonzero()[:, 0]
    return torch.cat((chosen, left[evenly_spaced(len(left), budget - len(chosen), chosen.device)]))
