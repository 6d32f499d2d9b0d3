"""Matmul attention for training: torch's fused CPU attention has a slow backward; this one compiles well."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "vidspec_matmul"


def register() -> str:
    """Make the attention known to transformers; returns the name to pass as `attn_implementation`."""
    AttentionInterface.register(NAME, _matmul_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def _matmul_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, Q, D]
    key: torch.Tensor,  # [B, G, K, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # additive [B, 1, Q, K]
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None
