"""The strategies by name: HIPPO, and those it is compared with: strategies of other papers and simple ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression.dycoke import compared_with
from vidspec_models.preservation.hippo import hippo, ranks
from vidspec_models.preservation.selection import (
    NEIGHBOURHOOD,
    Candidates,
    Strategy,
    cosines,
    evenly_spaced,
    filled_evenly,
    top_indices,
)

_TOP_P = 0.4  # SpecVLM's lambda


def specvlm(cells: Candidates, relevance: Tensor | None) -> Tensor:
    """SpecVLM (arXiv 2508.16201), both stages: the smallest set of cells with a share lambda = 0.4 of the attention
    (top-P), then evenly spaced cells of the rest.
    """
    if relevance is None:
        return uniform(cells)
    order = top_indices(relevance, cells.num_cells)
    reached = relevance[order].cumsum(0)
    num_top = min(int((reached < _TOP_P * reached[-1]).sum()) + 1, cells.budget)
    return filled_evenly(order[:num_top], cells.num_cells, cells.budget)


def attention(cells: Candidates, relevance: Tensor | None) -> Tensor:
    """The cells with the most attention, without corrections; evenly spaced cells while attention is not known."""
    return uniform(cells) if relevance is None else top_indices(relevance, cells.budget)


def unbiased(cells: Candidates, _: Tensor | None = None) -> Tensor:
    """Similar to ParallelVLM (arXiv 2603.19610): novelty and distinctiveness, without attention and so its bias."""
    return top_indices(ranks(temporal_novelty(cells)) + ranks(cells.distinctiveness), cells.budget)


def uniform(cells: Candidates, _: Tensor | None = None) -> Tensor:
    """Evenly spaced in reading order, both ends included."""
    return evenly_spaced(cells.num_cells, cells.budget, cells.frames.device)


def random(cells: Candidates, _: Tensor | None = None) -> Tensor:
    """Drawn at random without replacement, determined by the seed."""
    drawn = np.random.default_rng(cells.seed).permutation(cells.num_cells)[: cells.budget]
    return torch.from_numpy(drawn).to(cells.frames.device)


def temporal_merging(cells: Candidates, _: Tensor | None = None) -> Tensor:
    """DyCoke's first stage (arXiv 2411.15024) on the draft, within a budget: the first frame of each window stays
    whole; of the others the cells least similar to their counterparts stay. If the first frames alone exceed the
    budget, evenly spaced cells of them stay.
    """
    frames = torch.arange(cells.num_frames, device=cells.frames.device)
    begins = frames.masked_fill(~cells.is_first, 0).cummax(0).values  # [F]: the first frame of each frame's video
    earlier = begins + frames.new_tensor([compared_with(frame) for frame in (frames - begins).tolist()])
    is_whole = (earlier == frames)[cells.frames]
    whole = is_whole.nonzero()[:, 0]
    if len(whole) >= cells.budget:
        return whole[evenly_spaced(len(whole), cells.budget, whole.device)]
    units = functional.normalize(cells.features.float(), dim=-1)
    before, are_there = cells.neighbours(earlier[cells.frames], [(0, 0)])
    (alike,) = cosines(units, before).masked_fill(~are_there, 0.0)
    return top_indices((1.0 - alike).masked_fill(is_whole, torch.inf), cells.budget)


def everything(cells: Candidates, _: Tensor | None = None) -> Tensor:
    """No pruning."""
    return torch.arange(cells.num_cells, device=cells.frames.device)


def nothing(cells: Candidates, _: Tensor | None = None) -> Tensor:
    """The draft sees no cell at all: shows how well it guesses from text alone."""
    return cells.frames.new_zeros(0)


def temporal_novelty(cells: Candidates) -> Tensor:
    """float32 [C]: 1 - the largest cosine with the 3 x 3 cells around the same place one frame earlier.

    Cells without earlier cells to compare with get the mean of the others, so that a first frame is neither preferred
    nor neglected.
    """
    before, are_there = cells.neighbours(cells.frames - 1, NEIGHBOURHOOD)
    are_there &= ~cells.is_first[cells.frames]  # the frame before belongs to another video
    novelty = 1.0 - cosines(cells.units, before).masked_fill(~are_there, -torch.inf).amax(0)
    is_known = novelty.isfinite()
    neutral = novelty[is_known].mean() if is_known.any() else 0.0
    return novelty.masked_fill(~is_known, float(neutral))


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(name="hippo", select=hippo, relevance="video"),
        Strategy(name="specvlm", select=specvlm, relevance="all"),
        Strategy(name="attention", select=attention, relevance="all"),
        Strategy(name="unbiased", select=unbiased),
        Strategy(name="uniform", select=uniform),
        Strategy(name="random", select=random),
        Strategy(name="ttm", select=temporal_merging),
        Strategy(name="none", select=everything, ignores_ratio=True),
        Strategy(name="blind", select=nothing, ignores_ratio=True),
    )
}
