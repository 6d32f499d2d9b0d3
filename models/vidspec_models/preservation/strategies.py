"""Which video rows a draft sees: HIPPO's choice and the strategies it is compared with, by name, under a budget.

Everything here can change the draft's guesses only, never the target's text. Sources and formulas: docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL, Prompt
from vidspec_models.preservation import baselines
from vidspec_models.preservation.scores import (
    Candidates,
    centred,
    debiased,
    diverse,
    ranks,
    relative,
    spatial_distinctiveness,
    with_even,
)
from vidspec_models.preservation.text_queries import RelevanceLaw

LEAST_KEPT = 16  # cells: below that a clip is too short to prune further
_MOST_PRUNED = 0.99

# HIPPO's shares, chosen on validation clips (docs/methods.md).
_DISTINCT_SHARE = 0.05  # of quality; the rest is relevance
_PLACE_POWER = 0.1
_EVEN_SHARE = 0.1  # of the budget


def hippo(cells: Candidates) -> Tensor:
    """Ours after HIPPO (arXiv 2601.08273): what the text looks at and what stands out, each less what cells chosen near
    it show. Without relevance distinctiveness is all there is.
    """
    units = centred(cells.features)
    quality = ranks(spatial_distinctiveness(units, cells))
    if cells.relevance is not None:
        relevance = relative(debiased(cells.relevance, cells, _PLACE_POWER))
        quality = _DISTINCT_SHARE * quality + (1 - _DISTINCT_SHARE) * relevance
    num_diverse = cells.budget - int(_EVEN_SHARE * cells.budget)
    return with_even(diverse(quality, units, cells.frames, num_diverse), cells.num_cells, cells.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named way to choose. `relevance` says which attention the target has to measure for it, if any."""

    name: str
    select: Callable[[Candidates], Tensor]  # indices of the kept cells, in any order
    relevance: RelevanceLaw | None = None
    ignores_ratio: bool = False


_EVERY_LAYER_AND_ROW = RelevanceLaw(among_video=False)

STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(name="hippo", select=hippo, relevance=RelevanceLaw(among_video=True)),
        Strategy(name="specvlm", select=baselines.specvlm, relevance=_EVERY_LAYER_AND_ROW),
        Strategy(name="attention", select=baselines.attention, relevance=_EVERY_LAYER_AND_ROW),
        Strategy(name="unbiased", select=baselines.unbiased),
        Strategy(name="uniform", select=baselines.uniform),
        Strategy(name="random", select=baselines.random),
        Strategy(name="ttm", select=baselines.temporal_merging),
        Strategy(name="none", select=baselines.everything, ignores_ratio=True),
        Strategy(name="blind", select=baselines.nothing, ignores_ratio=True),
    )
}


def find_strategy(name: str) -> Strategy:
    """Raises ValueError naming all strategies."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown preservation strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def require_ratio(ratio: float) -> None:
    """Raise ValueError for a share that may not be pruned."""
    if not 0.0 <= ratio <= _MOST_PRUNED:
        raise ValueError(f"the pruned share must be in [0, {_MOST_PRUNED}], not {ratio!r}")


def num_kept(num_cells: int, ratio: float) -> int:
    """Cells of `num_cells` that stay when a share `ratio` is pruned: never fewer than 16, all if there are fewer."""
    require_ratio(ratio)
    return min(num_cells, max(LEAST_KEPT, int((1.0 - ratio) * num_cells + 1e-9)))


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
    chosen = strategy.select(Candidates.of(features[cells], places[cells], known, budget, seed))
    stays = ~is_cell
    stays[cells[chosen]] = True
    return stays.nonzero()[:, 0]


@torch.inference_mode()
def kept_of_prompt(
    strategy: Strategy, ratio: float, prompt: Prompt, relevance: Tensor | None = None, seed: int = 0
) -> Tensor:
    """`kept_rows` of a prompt's own video rows; relevance [V] or None."""
    features = prompt.embeddings[prompt.is_video]
    return kept_rows(strategy, ratio, features, prompt.grid, relevance, seed)
