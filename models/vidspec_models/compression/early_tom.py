"""EarlyTom (arXiv 2605.30010): frames that repeat each other are merged inside the vision tower, which then computes
fewer; of what is left, tokens are chosen by how much the tower attends to them.

Frames come in groups of a few, as they go through the tower. Sums are in float64 and likenesses are rounded, so that
neither what is merged nor what is chosen hangs on how many threads added them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

_DECIMALS = 6
_ROUNDING = 1e-9  # 0.3 * 10 is a hair above 3 in places
_LEAST_ALIKE = 0.8  # the code's T at a quarter of the tokens
_FRESH = 0.9  # what the newest frame counts in a segment's running likeness
_MERGED_BEHIND = (0.31, 0.81, 0.9)  # of a tower's layers: behind the 9th, 22nd and 24th of SigLIP's 26, as the code


def merging_layers(num_layers: int) -> list[int]:
    """Numbers of the layers behind which frames are merged, of so many whose output is read: never behind the last."""
    return sorted({int(share * num_layers) for share in _MERGED_BEHIND} - {num_layers - 1})


def likeness(one: Tensor, other: Tensor) -> float:
    """Mean cosine of two frames' tokens [P, W], each with its counterpart."""
    cosines = functional.cosine_similarity(one.double(), other.double(), dim=-1)
    return round(float(cosines.mean()), _DECIMALS)


def segments(frames: Tensor) -> list[range]:
    """Stretches of frames [F, P, W] that stay like their first one ("streaming frame segmentation")."""
    found, first, alike = list[range](), 0, 1.0
    for number in range(1, len(frames)):
        alike = _FRESH * likeness(frames[first], frames[number]) + (1 - _FRESH) * alike
        if alike < _LEAST_ALIKE:
            found.append(range(first, number))
            first, alike = number, 1.0
    return [*found, range(first, len(frames))]


def merge_frames(frames: Tensor) -> tuple[Tensor, list[int]]:
    """Frames [F, P, W] become [N, P, W], N <= F; and for each of the F, which of the N stands for it.

    First and last of a segment stay. Two neighbours in its middle become one where they are as much alike as first and
    last, and as the second of them and its next: their mean, weighted by both likenesses ("local-optimal criterion").
    """
    merged, stands_for = list[Tensor](), list[int]()
    for segment in segments(frames):
        weights = _pairs(frames, segment)
        number = segment.start
        while number < segment.stop:
            count, frame = 1, frames[number]
            if (weight := weights.get(number)) is not None:
                count, frame = 2, weight * frame + (1 - weight) * frames[number + 1]
            stands_for += [len(merged)] * count
            merged.append(frame)
            number += count
    return torch.stack(merged), stands_for


def _pairs(frames: Tensor, segment: range) -> dict[int, float]:
    """The first frame of each pair that becomes one, and its weight."""
    middle, pairs, at = segment[1:-1], dict[int, float](), 0
    alike = [likeness(frames[number], frames[number + 1]) for number in middle[:-1]]
    least = likeness(frames[segment[0]], frames[segment[-1]]) if alike else 1.0
    while at < len(alike):
        following = alike[at + 1] if at + 1 < len(alike) else 0.0
        is_pair = alike[at] >= max(least, following)  # also where nothing moves: the code wants more
        if is_pair:
            pairs[middle[at]] = alike[at] / (alike[at] + following)
        at += 1 + is_pair
    return pairs


def choose(attention: Tensor, stretches: Sequence[range], ratio: float) -> Tensor:
    """Which tokens stay, bool [N, M], a share of `ratio`, by the attention [N, M] that they receive.

    First and last frame of a segment show what changes: those of most attention stay. In frames between them attention
    gathers in a few places that show nothing ("sinks"), so they are cut into as many windows as tokens stay, and of
    each window the one of most attention does.
    """
    scores = attention.round(decimals=_DECIMALS)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    num_tokens = scores.shape[1]
    num_changing = min(num_tokens, ceil(num_tokens * ratio - _ROUNDING))
    num_still = min(num_tokens, max(1, round(num_tokens * ratio)))
    for stretch in stretches:
        for number in stretch:
            row = scores[number]
            if number in (stretch[0], stretch[-1]):
                chosen = row.argsort(descending=True, stable=True)[:num_changing]
            else:
                places = torch.arange(num_tokens, device=row.device).tensor_split(num_still)
                chosen = torch.stack([window[row[window].argmax()] for window in places])
            kept[number, chosen] = True
    return kept
