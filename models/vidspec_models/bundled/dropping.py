"""Which visual tokens a training sample keeps: physically (to save time) or by mask (to teach the draft pruning)."""

from __future__ import annotations

import torch


def choose_tokens(content: torch.Tensor, num_kept: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers [C, K] of `num_kept` tokens per clip, ascending: those with content first, then random others."""
    if num_kept >= content.shape[1]:
        return torch.arange(content.shape[1]).expand(content.shape[0], -1)
    rank = torch.rand(content.shape, generator=generator) + content.float()
    return rank.topk(num_kept, dim=1).indices.sort(dim=1).values


def draft_visibility(content: torch.Tensor, full_share: float, generator: torch.Generator) -> torch.Tensor:
    """Visible tokens [C, K] for the draft: some samples see all, some nothing, the rest a random or biased share."""
    count, size = content.shape
    kind = torch.rand(count, 1, generator=generator)
    keep_share = torch.rand(count, 1, generator=generator) ** 2 * 0.6 + 0.03
    bias = torch.where(torch.rand(count, 1, generator=generator) < 0.5, 0.8, 0.0)
    rank = torch.rand(count, size, generator=generator) + bias * content.float()
    order = rank.argsort(dim=1, descending=True).argsort(dim=1)
    visible = order < (keep_share * size)
    blind = kind > 1 - 0.25 * (1 - full_share)
    return (visible & ~blind) | (kind < full_share)


def target_visibility(content: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Visible tokens [C, K] for the target: a fifth of the samples lose up to half of their tokens."""
    count, size = content.shape
    lost = torch.rand(count, 1, generator=generator) * 0.5
    loses = torch.rand(count, 1, generator=generator) < 0.2
    return (torch.rand(count, size, generator=generator) >= lost) | ~loses
