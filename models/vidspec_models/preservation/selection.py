"""Which video rows a draft sees: the cells that a strategy chooses under a budget, and all rows that are no cells.

Everything here can change the draft's guesses only, never the target's text. Sources and formulas: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL, Prompt, begins_video
from vidspec_models.preservation.text_queries import RelevanceLaw

LEAST_KEPT = 16  # cells: below that a clip is too short to prune further
_MOST_PRUNED = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The C cells of a prompt's videos, what the text pays to each, and how many of them may stay.

    They lie in F frames of fewer than R x S places each: there is no cell in the last row or column. Two videos' frames
    are no neighbours in time.
    """

    features: Tensor  # [C, hidden], projected
    frames: Tensor  # int64 [C], counted without gaps
    slots: Tensor  # int64 [C]: place within the frame, row * S + column
    times: Tensor  # int64 [F], increasing: neighbours are 1 apart, frames of two videos more than CLIP_GAP
    shape: tuple[int, int]  # R, S
    relevance: Tensor | None  # float32 [C]: attention of the text; None: not known (yet)
    budget: int
    seed: int

    @classmethod
    def of(
        cls, features: Tensor, places: Tensor, relevance: Tensor | None = None, budget: int = 0, seed: int = 0
    ) -> Candidates:
        """`places` are int64 [C, 3]: (frame, row, column), of one cell at least, in reading order."""
        times, frames = places[:, 0].unique(return_inverse=True)
        rows, columns = int(places[:, 1].max()) + 2, int(places[:, 2].max()) + 2
        return cls(
            features=features,
            frames=frames,
            slots=places[:, 1] * columns + places[:, 2],
            times=times,
            shape=(rows, columns),
            relevance=relevance,
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
        return begins_video(self.times)

    def beside(self, frames: Tensor, steps: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """What lies D steps (down, right), each of one place at most, from every cell's place, in `frames`, int64 [C].

        The cells' numbers, int64 [D, C], and whether there is one, bool [D, C]; where there is none, the number says
        nothing. They are searched for, since with a table of all places every frame would be as high as the highest
        and as wide as the widest.
        """
        rows, columns = self.shape
        numbers = self.frames * (rows * columns) + self.slots
        offsets = self.slots.new_tensor([down * columns + right for down, right in steps])
        wanted = frames * (rows * columns) + self.slots + offsets[:, None]
        found = torch.searchsorted(numbers, wanted).clamp(max=self.num_cells - 1)
        return found, numbers[found] == wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named way to choose. `relevance` says which attention the target has to measure for it, if any."""

    name: str
    select: Callable[[Candidates], Tensor]  # indices of the kept cells, in any order
    relevance: RelevanceLaw | None = None
    ignores_ratio: bool = False


def num_kept(num_cells: int, ratio: float) -> int:
    """Cells of `num_cells` that stay when a share `ratio` is pruned: never fewer than 16, all if there are fewer."""
    return min(num_cells, max(LEAST_KEPT, int((1.0 - ratio) * num_cells + 1e-9)))


@torch.inference_mode()
def kept_of_prompt(
    strategy: Strategy, ratio: float, prompt: Prompt, relevance: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Sorted indices, int64, of the prompt's V video rows that stay.

    Rows that are no cells always stay. relevance is float [V] or None; ratio is the share of cells to prune, in
    [0, 0.99]. Raises ValueError for another ratio or for shapes that do not fit.
    """
    if not 0.0 <= ratio <= _MOST_PRUNED:
        raise ValueError(f"the pruned share must be in [0, {_MOST_PRUNED}], not {ratio!r}")
    features, grid = prompt.embeddings[prompt.is_video], prompt.grid
    for name, array in (("grid", grid), ("relevance", relevance)):
        if array is not None and len(array) != len(features):
            raise ValueError(f"{name} is for {len(array)} video rows, there are {len(features)}")
    is_cell = (grid != NO_CELL).all(1)
    cells = is_cell.nonzero()[:, 0]
    budget = num_kept(len(cells), 0.0 if strategy.ignores_ratio else ratio)
    if not len(cells) or (budget == len(cells) and not strategy.ignores_ratio):
        return torch.arange(len(features), device=features.device)
    known = None if relevance is None else relevance[cells].float().nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
    chosen = strategy.select(Candidates.of(features[cells], grid[cells], known, budget, seed))
    stays = ~is_cell
    stays[cells[chosen]] = True
    return stays.nonzero()[:, 0]


def best(scores: Tensor, budget: int) -> Tensor:
    """Indices of the `budget` largest of [C]; equal ones in order."""
    return scores.argsort(descending=True, stable=True)[:budget]


def spaced(num_all: int, num_wanted: int, device: torch.device) -> Tensor:
    """`num_wanted` different indices below `num_all`, int64, evenly spaced, both ends included."""
    if num_wanted >= num_all:
        return torch.arange(num_all, device=device)
    return torch.from_numpy(np.linspace(0, num_all - 1, max(num_wanted, 0)).round().astype(np.int64)).to(device)


def with_even(chosen: Tensor, num_cells: int, budget: int) -> Tensor:
    """`budget` indices: those `chosen` (of `num_cells`), and what is left of the budget evenly from all others.

    Evenly spaced in reading order, the others are a floor for every frame: with m of them among L, no run of
    ceil((L - 1) / (m - 1)) of these is left without one, so no frame of that many cells is.
    """
    is_left = torch.ones(num_cells, dtype=torch.bool, device=chosen.device)
    is_left[chosen] = False
    left = is_left.nonzero()[:, 0]
    return torch.cat((chosen, left[spaced(len(left), budget - len(chosen), chosen.device)]))
