"""EarlyTom (arXiv 2605.30010): frames that repeat each other are merged inside the vision tower, which then computes
fewer frames; of the remaining tokens, those are chosen that get most of the tower's attention.

Frames come in the groups in which they go through the tower. Similarities and scores are rounded, and on a CPU summed
in float64: so equal rows give equal choices, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

_DECIMALS = 6
_ROUNDING = 1e-9  # 0.07 * 100 is slightly above 7 in floating point
_MIN_ALIKE = 0.8  # T in the authors' code for MVBench at a quarter of the tokens
_FRESH = 0.9  # weight of the newest frame in a segment's running similarity
_MERGED_BEHIND = (0.31, 0.81, 0.9)  # relative depth: after layers 8, 21 and 23 of SigLIP's 26, counted from 0

Likenesses = Sequence[Sequence[float]]


def merging_layers(num_layers: int) -> list[int]:
    """Numbers, from 0, of the layers after which frames are merged, out of `num_layers` in use; never the last one."""
    return sorted({int(share * num_layers) for share in _MERGED_BEHIND} & set(range(num_layers - 1)))


def precise(rows: Tensor) -> Tensor:
    """The rows in float64 on a CPU, where threads share the sums; a GPU adds in one order and is slow in float64."""
    return rows.double() if rows.device.type == "cpu" else rows.float()


def likenesses(frames: Tensor) -> Likenesses:
    """Similarity [F][F] of frames [F, P, W]: the mean cosine of the tokens at equal places."""
    tokens = functional.normalize(precise(frames), dim=-1).flatten(1)
    alike: list[list[float]] = (tokens @ tokens.T / frames.shape[1]).round(decimals=_DECIMALS).tolist()
    return alike


def segments(alike: Likenesses) -> list[range]:
    """Segments of successive frames that stay similar to their first frame ("streaming frame segmentation")."""
    found, first, running = list[range](), 0, 1.0
    for number in range(1, len(alike)):
        running = _FRESH * alike[first][number] + (1 - _FRESH) * running
        if running < _MIN_ALIKE:
            found.append(range(first, number))
            first, running = number, 1.0
    return [*found, range(first, len(alike))]


def merge_frames(frames: Tensor) -> tuple[Tensor, list[int]]:
    """Merge frames [F, P, W] to [N, P, W], N <= F; also returns for each of the F which of the N stands for it.

    The first and the last frame of a segment stay. Two neighbours between them are merged if they are at least as
    similar as the first and the last frame are, and as the second neighbour and its successor are ("local-optimal
    criterion"). The result is their mean, weighted by both similarities; the first neighbour alone without a successor.
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
    """The first frame of each pair to merge, and its weight in the mean."""
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
    """Which tokens stay, bool [N, M]: a share `ratio`, at most all, chosen by the attention [N, M] that they receive.

    The first and the last frame of a segment show what changes: their tokens with most attention stay. In the frames
    between them attention gathers at a few places without content ("sinks"). So these frames are cut into as many
    windows as tokens stay, and of each window the token with most attention stays.
    """
    scores = attention.round(decimals=_DECIMALS)
    ends = sorted({stretch[place] for stretch in stretches for place in (0, -1)})
    between = sorted(set(range(len(scores))) - set(ends))
    kept, num_tokens = torch.zeros_like(scores, dtype=torch.bool), scores.shape[1]
    num_chosen = ceil(num_tokens * ratio - _ROUNDING)
    order = scores[ends].argsort(dim=1, descending=True, stable=True)
    kept[ends] = kept[ends].scatter(1, order[:, :num_chosen], True)
    first, places = 0, list[Tensor]()
    size, num_longer = divmod(num_tokens, min(num_tokens, max(1, round(num_tokens * ratio))))
    for length, end in ((size + 1, num_longer * (size + 1)), (size, num_tokens)):  # as `tensor_split` cuts
        windows = scores[between, first:end].unflatten(1, (-1, length))
        starts = torch.arange(first, end, length, device=scores.device)
        places.append(windows.argmax(2) + starts)
        first = end
    kept[between] = kept[between].scatter(1, torch.cat(places, 1), True)
    return kept
