"""Which video rows a draft sees: the cells that a strategy chooses within a budget, and all rows that are not cells.

Everything here changes only the draft's guesses, never the target's text. Sources and formulas: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL, Prompt, begins_video
from vidspec_models.preservation.text_queries import RelevanceLaw

LEAST_KEPT = 16  # cells; a clip with fewer is too short to prune
_MOST_PRUNED = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The C cells of a prompt's videos, the text's attention to each cell, and how many of them may stay.

    The cells are in F frames of R x S places each. The last row and column have no cells, so a step beyond a frame's
    edge finds none. Frames of different videos are never neighbours in time.
    """

    features: Tensor  # [C, hidden], projected
    frames: Tensor  # int64 [C]: frame index, counted without gaps
    slots: Tensor  # int64 [C]: place within the frame, row * S + column
    times: Tensor  # int64 [F], increasing: neighbours are 1 apart, frames of different videos more than CLIP_GAP
    shape: tuple[int, int]  # R, S
    relevance: Tensor | None  # float32 [C]: attention of the text; None: not known, or not yet
    budget: int
    seed: int

    @classmethod
    def of(
        cls, features: Tensor, places: Tensor, relevance: Tensor | None = None, budget: int = 0, seed: int = 0
    ) -> Candidates:
        """`places` are int64 [C, 3]: (frame, row, column) in reading order, with at least one cell."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named way to choose cells. `relevance` says which attention the target must measure for it, if any."""

    name: str
    select: Callable[[Candidates], Tensor]  # indices of the kept cells, in any order
    relevance: RelevanceLaw | None = None
    ignores_ratio: bool = False


def num_kept(num_cells: int, ratio: float) -> int:
    """How many of `num_cells` cells stay if a share `ratio` is pruned: at least 16, or all if there are fewer."""
    return min(num_cells, max(LEAST_KEPT, int((1.0 - ratio) * num_cells + 1e-9)))


@torch.inference_mode()
def kept_of_prompt(
    strategy: Strategy, ratio: float, prompt: Prompt, relevance: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Sorted indices, int64, of the prompt's V video rows that stay.

    Rows that are not cells always stay. relevance is float [V] or None; ratio is the share of cells to prune, in
    [0, 0.99]. Raises ValueError for a ratio outside this range or for shapes that do not match.
    """
    if not 0.0 <= ratio <= _MOST_PRUNED:
        raise ValueError(f"the pruned share must be in [0, {_MOST_PRUNED}], not {ratio!r}")
    features, grid = prompt.embeddings[prompt.is_video], prompt.grid
    for name, array in (("grid", grid), ("relevance", relevance)):
        if array is not None and len(array) != len(features):
            raise ValueError(f"{name} is for {len(array)} video rows, but there are {len(features)}")
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
    """Indices of the `budget` largest of [C]; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:budget]


def spaced(num_all: int, num_wanted: int, device: torch.device) -> Tensor:
    """`num_wanted` different indices below `num_all`, int64, evenly spaced, both ends included."""
    if num_wanted >= num_all:
        return torch.arange(num_all, device=device)
    return torch.from_numpy(np.linspace(0, num_all - 1, max(num_wanted, 0)).round().astype(np.int64)).to(device)


def with_even(chosen: Tensor, num_cells: int, budget: int) -> Tensor:
    """`budget` indices below `num_cells`: those in `chosen`, and the rest of the budget evenly from all other cells.

    The even ones guarantee something of every frame: with m of them, evenly spaced in reading order among L cells, each
    run of ceil((L - 1) / (m - 1)) of these cells has one, and so has every frame with that many of them.
    """
    is_left = torch.ones(num_cells, dtype=torch.bool, device=chosen.device)
    is_left[chosen] = False
    left = is_left.nonzero()[:, 0]
    return torch.cat((chosen, left[spaced(len(left), budget - len(chosen), chosen.device)]))
