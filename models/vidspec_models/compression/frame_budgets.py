"""V-CAST and VidCom2: every frame has a budget of tokens, a larger one where the video changes, for unusual tokens.

Both choose from the projected features alone, independently of the prompt; the chosen tokens keep features and
positions. Sums are in float64 and scores are rounded, so that the choice does not depend on the number of threads. To
save memory, only a few frames at a time are in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

_DECIMALS = 6
_CURVATURE_TEMPERATURE = 0.7
_UNIQUENESS_TEMPERATURE = 0.01
_KERNEL_WIDTHS = (1 / 8, 1 / 4, 1 / 2, 1, 2)
_ROWS_AT_ONCE = 2048  # rows that are in float64 at a time


def v_cast(features: Tensor, ratio: float) -> Tensor:
    """Which tokens stay by V-CAST (arXiv 2603.27650): bool [F, M] for features [F, M, hidden size].

    A share `ratio` of all tokens stays, and at least one of every frame. A frame's budget grows with the curvature of
    the path of the frames' means; within it, tokens least similar to their frame's mean and of largest norm stay.
    """
    means = functional.normalize(torch.cat([tokens.mean(1) for tokens in _in_parts(features)]), dim=-1)
    weights = (curvature(means) / _CURVATURE_TEMPERATURE).softmax(0).round(decimals=_DECIMALS)
    num_frames, num_tokens = features.shape[:2]
    budget = max(num_frames, round(ratio * num_frames * num_tokens))
    directions = (functional.normalize(tokens.mean(1, keepdim=True), dim=-1) for tokens in _in_parts(features))
    pairs = zip(_in_parts(features), directions, strict=True)
    unlike = torch.cat([1 - functional.cosine_similarity(tokens, mean, dim=-1) for tokens, mean in pairs])
    length = torch.cat([tokens.norm(dim=-1) for tokens in _in_parts(features)])
    least, most = length.amin(1, keepdim=True), length.amax(1, keepdim=True)
    return _highest(unlike + (length - least) / (most - least + 1e-6), share_out(budget, weights.tolist(), num_tokens))


def curvature(means: Tensor) -> Tensor:
    """How sharply a path of points [F, hidden size] turns at each point: 1 - cosine of both steps; 1 at its ends."""
    turns = 1 - functional.cosine_similarity(means[1:-1] - means[:-2], means[2:] - means[1:-1], dim=-1, eps=1e-6)
    ends = means.new_ones(1)
    return torch.cat((ends, turns, ends))[: len(means)]


def share_out(budget: int, weights: list[float], most: int) -> list[int]:
    """Divide the budget by weight, 1 to `most` each; the remainder goes to the largest fractional parts first."""
    budget = min(budget, most * len(weights))
    wanted = [(budget - len(weights)) * weight / sum(weights) for weight in weights]
    counts = [1 + min(int(share), most - 1) for share in wanted]
    by_fraction = sorted(range(len(weights)), key=lambda frame: (int(wanted[frame]) - wanted[frame], frame))
    while (over := budget - sum(counts)) > 0:
        for frame in [frame for frame in by_fraction if counts[frame] < most][:over]:
            counts[frame] += 1
    return counts


def vidcom2(features: Tensor, ratio: float) -> Tensor:
    """Which tokens stay by VidCom2 (arXiv 2505.14454): bool [F, M] for features [F, M, hidden size].

    At least one token of every frame stays; more than a share `ratio` of frames that differ from the video, less of
    others. Tokens least similar to the means of the video and of their frame stay, compared in the half of the channels
    that varies least.
    """
    steady = _steady_channels(features)

    def directions() -> Iterator[Tensor]:
        return (functional.normalize(tokens[..., steady], dim=-1) for tokens in _in_parts(features))

    num_frames, num_tokens = features.shape[:2]
    centre = torch.stack([tokens.sum((0, 1)) for tokens in directions()]).sum(0) / (num_frames * num_tokens)
    like_video = torch.cat([_likeness(tokens, centre) for tokens in directions()])
    like_frame = torch.cat([_likeness(tokens, tokens.mean(1, keepdim=True)) for tokens in directions()])
    uniqueness = (-like_video.mean(1) / _UNIQUENESS_TEMPERATURE).softmax(0)
    shares = ratio * (1 + uniqueness - uniqueness.mean())
    counts = [min(num_tokens, max(1, round(round(share, _DECIMALS) * num_tokens))) for share in shares.tolist()]
    return _highest(-like_video - like_frame, counts)


def _in_parts(features: Tensor) -> Iterator[Tensor]:
    """Yields the video [F, M, C] in float64, a few frames at a time."""
    at_once = max(1, _ROWS_AT_ONCE // features.shape[1])
    return (part.double() for part in features.split(at_once))


def _steady_channels(features: Tensor) -> Tensor:
    """Indices of the half of the channels that varies least over all tokens of a video [F, M, C]."""
    num_tokens = features.shape[0] * features.shape[1]
    mean = torch.stack([tokens.sum((0, 1)) for tokens in _in_parts(features)]).sum(0) / num_tokens
    squares = torch.stack([(tokens - mean).square().sum((0, 1)) for tokens in _in_parts(features)]).sum(0)
    variances = (squares / num_tokens).round(decimals=2 * _DECIMALS)
    return variances.argsort(stable=True)[: max(1, len(variances) // 2)]


def _likeness(tokens: Tensor, centre: Tensor) -> Tensor:
    """Sum of Gaussian kernels of several widths, [F, M], between tokens [F, M, C] and `centre`."""
    distance = (tokens - centre).square().sum(-1)
    return torch.stack([(-distance / (2 * width)).exp() for width in _KERNEL_WIDTHS]).sum(0)


def _highest(scores: Tensor, counts: list[int]) -> Tensor:
    """The tokens with the highest scores of each frame, bool [F, M]; of equal scores the first."""
    order = scores.round(decimals=_DECIMALS).argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(scores.shape[1], device=scores.device) < torch.tensor(counts, device=scores.device)[:, None]
    return torch.zeros_like(chosen).scatter(1, order, chosen)
