"""EarlyTom (arXiv 2605.30010): frames that repeat each other are merged inside the vision tower, which then computes
fewer; of what is left, tokens are chosen by how much the tower attends to them.

Frames come in the groups in which they go through the tower. Likenesses and scores are rounded, and on a CPU added up
in float64: equal rows give equal choices, however many threads add them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

_DECIMALS = 6
_ROUNDING = 1e-9  # 0.07 * 100 is a hair above 7
_LEAST_ALIKE = 0.8  # the code's T for MVBench at a quarter of the tokens
_FRESH = 0.9  # what the newest frame counts in a segment's running likeness
_MERGED_BEHIND = (0.31, 0.81, 0.9)  # of a tower's layers: behind numbers 8, 21 and 23 of SigLIP's 26, from 0

Likenesses = Sequence[Sequence[float]]


def merging_layers(num_layers: int) -> list[int]:
    """Numbers, from 0, of the layers behind which frames are merged, of so many that are read; never the last."""
    return sorted({int(share * num_layers) for share in _MERGED_BEHIND} & set(range(num_layers - 1)))


def precise(rows: Tensor) -> Tensor:
    """In float64 where threads share the sums; a GPU adds in one order, and is slow in float64."""
    return rows.double() if rows.device.type == "cpu" else rows.float()


def likenesses(frames: Tensor) -> Likenesses:
    """Mean cosine [F][F] of the tokens of frames [F, P, W], each with its counterpart."""
    tokens = functional.normalize(precise(frames), dim=-1).flatten(1)
    alike: list[list[float]] = (tokens @ tokens.T / frames.shape[1]).round(decimals=_DECIMALS).tolist()
    return alike


def segments(alike: Likenesses) -> list[range]:
    """Stretches of frames that stay like their first one ("streaming frame segmentation")."""
    found, first, running = list[range](), 0, 1.0
    for number in range(1, len(alike)):
        running = _FRESH * alike[first][number] + (1 - _FRESH) * running
        if running < _LEAST_ALIKE:
            found.append(range(first, number))
            first, running = number, 1.0
    return [*found, range(first, len(alike))]


def merge_frames(frames: Tensor) -> tuple[Tensor, list[int]]:
    """Frames [F, P, W] become [N, P, W], N <= F; and for each of the F, which of the N stands for it.

    First and last of a segment stay. Two neighbours in its middle become one where they are as much alike as first and
    last, and as the second of them and the next in the middle ("local-optimal criterion"): their mean, weighted by both
    likenesses. Where there is no next one, the first of them alone.
    """
    alike = likenesses(frames)
    merged, stands_for = list[Tensor](), list[int]()
    for segment in segments(alike):
        weights = _pairs(alike, segment)
        number = segment.start
        while number < segment.stop:
            count, frame = 1, frames[number]
            if (weight := weights.get(number)) is not None:
                count, frame = 2, weight * frame + (1 - weight) * frames[number + 1]
            stands_for += [len(merged)] * count
            merged.append(frame)
            number += count
    return torch.stack(merged), stands_for


def _pairs(alike: Likenesses, segment: range) -> dict[int, float]:
    """The first frame of each pair that becomes one, and its weight."""
    middle, pairs, at = segment[1:-1], dict[int, float](), 0
    steps = [alike[number][number + 1] for number in middle[:-1]]
    while at < len(steps):
        following = steps[at + 1] if at + 1 < len(steps) else 0.0
        is_pair = steps[at] >= max(alike[segment[0]][segment[-1]], following)
        if is_pair:
            pairs[middle[at]] = steps[at] / (steps[at] + following)
        at += 1 + is_pair
    return pairs


def choose(attention: Tensor, stretches: Sequence[range], ratio: float) -> Tensor:
    """Which tokens stay, bool [N, M], a share of `ratio`, by the attention [N, M] that they receive.

    First and last frame of a segment show what changes: those of most attention stay. In frames between them attention
    gathers in a few places that show nothing ("sinks"), so they are cut into as many windows as tokens stay, and of
    each window the one of most attention does.
    """
    scores = attention.round(decimals=_DECIMALS)
    ends = sorted({stretch[place] for stretch in stretches for place in (0, -1)})
    between = sorted(set(range(len(scores))) - set(ends))
    kept, num_tokens = torch.zeros_like(scores, dtype=torch.bool), scores.shape[1]
    num_chosen = min(num_tokens, ceil(num_tokens * ratio - _ROUNDING))
    order = scores[ends].argsort(dim=1, descending=True, stable=True)
    kept[ends] = kept[ends].scatter(1, order[:, :num_chosen], True)
    if between:
        first, places = 0, list[Tensor]()
        size, num_longer = divmod(num_tokens, min(num_tokens, max(1, round(num_tokens * ratio))))
        for length, end in ((size + 1, num_longer * (size + 1)), (size, num_tokens)):  # as `tensor_split` cuts
            if first == end:
                continue
            windows = scores[between, first:end].unflatten(1, (-1, length))
            starts = torch.arange(first, end, length, device=scores.device)
            places.append(windows.argmax(2) + starts)
            first = end
        kept[between] = kept[between].scatter(1, torch.cat(places, 1), True)
    return kept
