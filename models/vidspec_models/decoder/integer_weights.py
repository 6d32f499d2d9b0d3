"""Integers of eight bits, a scale for each block of a row: what `int8` means, whoever computes with it.

A block's largest weight becomes 127. Scales have the eight significant bits of a bfloat16, so that an integer times its
scale is a float32 without rounding: the rounded weights, their integers and their scales follow from each other. What
weights are multiplied with is rounded likewise, row by row, when it is known (ADR 26).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vidspec_models.errors import ModelLoadError

INT8 = "int8"
BLOCK = 64  # successive weights of a row that share a scale
LARGEST = 127
LEAST_SCALE = 1e-37  # smaller blocks are nought


def to_integers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., K] and scales float32 [..., K / 64] of weights [..., K]; K must be a multiple of BLOCK."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / LARGEST).bfloat16().float()
    divisors = scales.where(scales > 0, 1.0).unsqueeze(-1)
    integers = (blocks / divisors).round().clamp(-LARGEST, LARGEST)
    return integers.to(torch.int8).flatten(-2), scales


def from_integers(integers: Tensor, scales: Tensor) -> Tensor:
    """The weights [..., K] in float32."""
    weights: Tensor = integers.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return weights.flatten(-2)


def round_rows(rows: Tensor) -> Tensor:
    """What rows [..., K] are multiplied as: eight bits, too, each block's largest number as 127."""
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) * (1 / LARGEST)
    rounded: Tensor = (blocks / scales.where(scales > LEAST_SCALE, 1.0)).round() * scales
    return rounded.flatten(-2).to(rows.dtype)


@torch.no_grad()
def round_weights(products: Iterable[nn.Linear]) -> None:
    """Every weight becomes one that int8 holds. An embedding that is the head, too, is rounded with it.

    Raises ModelLoadError where the rows of a product are not whole blocks.
    """
    linears = list(products)
    if widths := sorted({linear.weight.shape[1] for linear in linears if linear.weight.shape[1] % BLOCK}):
        raise ModelLoadError(
            f"int8 takes {BLOCK} weights at a time, and {widths[0]} is no multiple of that: dtype auto"
        )
    for linear in linears:
        linear.weight.copy_(from_integers(*to_integers(linear.weight)))


def compute_in_int8(products: Iterable[nn.Linear]) -> None:
    """Have transformers' own modules compute what kernels in int8 do, rounded rows and weights in float32.

    Raises ModelLoadError as `round_weights` does.
    """
    linears = list(products)
    round_weights(linears)
    for linear in linears:
        linear.register_forward_pre_hook(lambda _, given: (round_rows(given[0]),))


def language_products(language_model: Any, lm_head: Any) -> list[nn.Linear]:
    """All of a language model's."""
    linears = [lm_head]
    for layer in language_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linears += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return linears
