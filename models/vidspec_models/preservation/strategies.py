"""The strategies by name: what each keeps of a video's cells under a budget. Sources and formulas: docs/methods.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL

from .budget import best, num_kept, require_ratio, spaced, with_even
from .cell_grid import CellGrid
from .diversity import diverse
from .local_scores import centred, spatial_distinctiveness, temporal_novelty
from .ranking import debiased, ranks, relative
from .temporal_merging import merged_in_time
from .text_queries import RelevanceLaw

_TOP_P = 0.4  # SpecVLM's lambda


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The C cells of a prompt's videos, and how many of them may stay."""

    features: Tensor  # [C, hidden], projected
    grid: CellGrid
    relevance: Tensor | None  # float32 [C]: attention that the text pays to each; None: not known (yet)
    budget: int
    seed: int


Select = Callable[[Candidates], Tensor]  # indices of the kept cells, in any order


@dataclass(frozen=True, slots=True, kw_only=True)
class Hippo:
    """Ours after HIPPO: what the text looks at and what stands out, each less what cells chosen near it show.

    Without relevance distinctiveness is all there is. The shares were chosen on validation clips (docs/methods.md).
    """

    distinct_share: float = 0.05  # of quality; the rest is relevance
    place_power: float = 0.1
    even_share: float = 0.1  # of the budget

    def __call__(self, cells: Candidates) -> Tensor:
        units = centred(cells.features)
        quality = ranks(spatial_distinctiveness(units, cells.grid))
        if cells.relevance is not None:
            relevance = relative(debiased(cells.relevance, cells.grid, self.place_power))
            quality = self.distinct_share * quality + (1 - self.distinct_share) * relevance
        num_diverse = cells.budget - int(self.even_share * cells.budget)
        chosen = diverse(quality, units, cells.grid.frames, num_diverse)
        return with_even(chosen, cells.grid.num_cells, cells.budget)


def specvlm(cells: Candidates) -> Tensor:
    """SpecVLM (arXiv 2508.16201): the smallest set that holds 0.4 of the attention, then evenly spaced ones."""
    if cells.relevance is None:
        return uniform(cells)
    order = best(cells.relevance, cells.grid.num_cells)
    reached = cells.relevance[order].cumsum(0)
    num_top = min(int((reached < _TOP_P * reached[-1]).sum()) + 1, cells.budget)
    return with_even(order[:num_top], cells.grid.num_cells, cells.budget)


def attention(cells: Candidates) -> Tensor:
    """The cells with most attention, as it is; evenly spaced ones while it is not known."""
    return uniform(cells) if cells.relevance is None else best(cells.relevance, cells.budget)


def unbiased(cells: Candidates) -> Tensor:
    """In the spirit of ParallelVLM (arXiv 2603.19610): no attention, none of its bias; novelty and distinctiveness."""
    units = centred(cells.features)
    scores = ranks(temporal_novelty(units, cells.grid)) + ranks(spatial_distinctiveness(units, cells.grid))
    return best(scores, cells.budget)


def uniform(cells: Candidates) -> Tensor:
    """Evenly spaced in reading order, both ends included."""
    return spaced(cells.grid.num_cells, cells.budget, cells.grid.frames.device)


def random(cells: Candidates) -> Tensor:
    """Drawn without replacement; the seed decides."""
    drawn = np.random.default_rng(cells.seed).permutation(cells.grid.num_cells)[: cells.budget]
    return torch.from_numpy(drawn).to(cells.grid.frames.device)


def temporal_merging(cells: Candidates) -> Tensor:
    """DyCoke's first stage (arXiv 2411.15024) on the draft; what it cannot reach is thinned out evenly."""
    return merged_in_time(cells.features, cells.grid, cells.budget)


def everything(cells: Candidates) -> Tensor:
    """No pruning."""
    return torch.arange(cells.grid.num_cells, device=cells.grid.frames.device)


def nothing(cells: Candidates) -> Tensor:
    """A draft that sees no cell at all: what text alone is worth."""
    return cells.grid.frames.new_zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named way to choose. `relevance` says which attention the target has to measure for it, if any."""

    name: str
    select: Select
    relevance: RelevanceLaw | None = None
    ignores_ratio: bool = field(default=False)


_EVERY_LAYER_AND_ROW = RelevanceLaw(among_video=False)

STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(name="hippo", select=Hippo(), relevance=RelevanceLaw(among_video=True)),
        Strategy(name="specvlm", select=specvlm, relevance=_EVERY_LAYER_AND_ROW),
        Strategy(name="attention", select=attention, relevance=_EVERY_LAYER_AND_ROW),
        Strategy(name="unbiased", select=unbiased),
        Strategy(name="uniform", select=uniform),
        Strategy(name="random", select=random),
        Strategy(name="ttm", select=temporal_merging),
        Strategy(name="none", select=everything, ignores_ratio=True),
        Strategy(name="blind", select=nothing, ignores_ratio=True),
    )
}


def find_strategy(name: str) -> Strategy:
    """Raises ValueError naming all strategies."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown preservation strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def kept_rows(
    strategy: Strategy,
    ratio: float,
    features: Tensor,
    grid: Tensor | None,
    relevance: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Sorted indices, int64, of the video rows that stay.

    features [V, hidden]: projected video rows; grid int64 [V, 3]: (frame, row, column), NO_CELL for rows that always
    stay, None for rows of no known place (one long line of one frame, then); relevance float [V] or None; ratio is
    the share of cells to prune, in [0, 0.99]. Raises ValueError for another ratio or for shapes that do not fit.
    """
    require_ratio(ratio)
    num_rows = len(features)
    for name, array in (("grid", grid), ("relevance", relevance)):
        if array is not None and len(array) != num_rows:
            raise ValueError(f"{name} is for {len(array)} video rows, there are {num_rows}")
    every_row = torch.arange(num_rows, device=features.device)
    places = torch.stack((torch.zeros_like(every_row),) * 2 + (every_row,), 1) if grid is None else grid
    is_cell = (places != NO_CELL).all(1)
    cells = is_cell.nonzero()[:, 0]
    budget = num_kept(len(cells), 0.0 if strategy.ignores_ratio else ratio)
    if not len(cells) or (budget == len(cells) and not strategy.ignores_ratio):
        return every_row
    known = None if relevance is None else relevance[cells].float().nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
    chosen = strategy.select(
        Candidates(
            features=features[cells],
            grid=CellGrid.of(places[cells]),
            relevance=known,
            budget=budget,
            seed=seed,
        )
    )
    stays = ~is_cell
    stays[cells[chosen]] = True
    return stays.nonzero()[:, 0]
