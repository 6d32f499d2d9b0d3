"""Which video rows the later layers leave out: one row's attention, the choice, and when a choice stands. Pure."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_STILL_ALIKE = 0.9  # the paper's gate


def attention_of_row(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """softmax(q k / sqrt(D)) of one row over all it sees, mean over heads: float32 [n].

    queries [H, D]; keys [KV, n, D], the row's own included; query head h reads key head h // (H / KV).
    """
    num_kv_heads = keys.shape[0]
    grouped = queries.float().unflatten(0, (num_kv_heads, -1))
    scores = torch.einsum("kgd,knd->kgn", grouped, keys.float()) * scale
    return scores.softmax(-1).mean((0, 1))


def hidden_by(attention: Tensor, count: int) -> Tensor:
    """The `count` candidates of least attention [candidates], ascending by index; of equals the later ones."""
    order = attention.argsort(descending=True, stable=True)
    return order[len(attention) - count :].sort().values


def still_stands(attention: Tensor, chosen_by: Tensor) -> bool:
    """The gate: is the attention [candidates] still like the one that the choice in force was made by?"""
    return bool(functional.cosine_similarity(attention, chosen_by, dim=0) >= _STILL_ALIKE)
