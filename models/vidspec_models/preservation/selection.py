"""Which video rows a draft sees: the cells that a strategy chooses within a budget, and all rows that are not cells.

Everything here changes only the draft's guesses, never the target's text. Sources and formulas: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vidspec_models.preservation.candidates import Candidates
from vidspec_models.preservation.text_queries import SoftmaxOver
from vidspec_models.prompt import NO_CELL, Prompt

MIN_KEPT = 16  # cells; a clip with fewer is too short to prune


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
