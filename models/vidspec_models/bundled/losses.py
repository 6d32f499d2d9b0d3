"""Losses and batch figures of the language stages, on answer positions only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .labels import IGNORE


def answer_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted cross-entropy; positions without an answer weigh nothing."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp_min(0).flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum()


def distillation_loss(draft: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted KL(target || draft)."""
    log_target = target.detach().log_softmax(-1)
    divergence = (log_target.exp() * (log_target - draft.log_softmax(-1))).sum(-1)
    return (divergence * weights).sum() / weights.sum()


def story_loss(logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the heads of their cross-entropies."""
    losses = []
    for name, values in logits.items():
        known = labels[name] != IGNORE
        if bool(known.any()):
            losses.append(F.cross_entropy(values[known], labels[name][known]))
    return torch.stack(losses).mean() if losses else torch.zeros(())


@torch.no_grad()
def story_accuracy(logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor], name: str) -> float:
    known = labels[name] != IGNORE
    return float((logits[name].argmax(-1)[known] == labels[name][known]).float().mean())


@torch.no_grad()
def answer_accuracy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, is_caption: torch.Tensor
) -> dict[str, float]:
    """Teacher-forced accuracy: all caption tokens, the fact words in captions, the words of short answers."""
    right = (logits.argmax(-1) == labels).float()
    answer = labels != IGNORE
    parts = {
        "caption": answer & is_caption,
        "facts": is_caption & (weights > 1.5),
        "qa": answer & ~is_caption & (weights > 1.5),
    }
    return {name: float(right[part].mean()) for name, part in parts.items()}
