"""Definition of `int8` for all backends: 8-bit integers with a scale for each block of a row.

A block's largest weight becomes 127. Scales have the eight significant bits of a bfloat16, so that integer times scale
is exact in float32: rounded weights can be converted to integers and scales and back without loss. The rows that
weights are multiplied with are rounded in the same way at run time, row by row (ADR 26).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vidspec_models.decoder.quantised import Quantised, make_plain, quantised_weight, round_to_four_bits
from vidspec_models.decoder.weights import linears_by_product
from vidspec_models.errors import ModelLoadError

INT8, INT4 = "int8", "int4"
BLOCK = 64  # successive weights of a row that share a scale; a row's last block may have fewer
LARGEST = 127
MIN_SCALE = 1e-37  # blocks with a smaller scale become 0
_ROWS_AT_ONCE = 128


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., K] and scales float32 [..., K / 64] of weights [..., K], K padded with zeros to whole blocks."""
    blocks = _blocks(weight)
    scales = (blocks.abs().amax(-1) / LARGEST).bfloat16().float()
    divisors = scales.where(scales > 0, 1.0).unsqueeze(-1)
    integers = (blocks / divisors).round_().clamp_(-LARGEST, LARGEST)
    return integers.to(torch.int8).flatten(-2), scales


def integers_of(weight: Tensor | Quantised) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and scales [N, K / 64]: a quantised checkpoint's own integers if they fit, else rounded."""
    if isinstance(weight, Tensor):
        return quantise(weight)
    return weight.integers(BLOCK) if weight.has_integers(BLOCK) else quantise(weight.weights(torch.float32))


def dequantise(integers: Tensor, scales: Tensor) -> Tensor:
    """The weights [..., K] in float32, K in whole blocks."""
    weights: Tensor = integers.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return weights.flatten(-2)


def fake_quantise_rows(rows: Tensor) -> Tensor:
    """Rows [..., K] rounded as int8 products round them: 8 bits, too, with each block's largest number as 127."""
    blocks = _blocks(rows)
    scales = blocks.abs().amax(-1, keepdim=True) * (1 / LARGEST)
    padded = ((blocks / scales.where(scales > MIN_SCALE, 1.0)).round() * scales).flatten(-2)
    rounded: Tensor = padded[..., : rows.shape[-1]].to(rows.dtype)
    return rounded


def _blocks(rows: Tensor) -> Tensor:
    """Rows [..., K] in float32 as [..., K / 64, 64], K padded with zeros to whole blocks."""
    blocks: Tensor = functional.pad(rows.float(), (0, -rows.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


@torch.no_grad()
def fake_quantise(products: Iterable[nn.Linear], dtype: torch.dtype = torch.float32) -> None:
    """Round every weight to a value that int8 can hold, then to `dtype`. An embedding tied to the head changes with it.

    A quantised weight whose own integers fit is converted and not rounded.
    """
    for linear in products:
        stored = quantised_weight(linear)
        make_plain(linear, dtype)
        linear.to(dtype)
        if stored is not None and stored.has_integers(BLOCK):
            continue
        for rows in linear.weight.split(_ROWS_AT_ONCE):  # all rows of a large head would take its memory three times
            rows.copy_(dequantise(*quantise(rows))[..., : linear.in_features])


def widen(model: nn.Module, leaving: Iterable[nn.Linear] = ()) -> None:
    """Convert all weights to float32, except those that only modules of `leaving` have."""
    left = set(leaving)
    for module in model.modules():
        if module not in left:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


def require_whole_blocks(products: Iterable[nn.Linear]) -> None:
    """Raise ModelLoadError if the rows of a product are not whole blocks."""
    if widths := sorted({linear.in_features for linear in products if linear.in_features % BLOCK}):
        raise ModelLoadError(
            f"int8 and int4 need row widths that are multiples of {BLOCK}, but one is {widths[0]}; choose another dtype"
        )


def round_layers_to_four_bits(language_model: Any) -> None:
    """For `int4`: four bits, with a scale and a zero for each block, for what a checkpoint does not have so.

    Raises ModelLoadError if the rows of a product are not whole blocks.
    """
    linears = layer_linears(language_model)
    require_whole_blocks(linears)
    round_to_four_bits(linears, BLOCK)


def compute_in_int8(products: Iterable[nn.Linear]) -> None:
    """Make transformers' own modules compute the same as int8 kernels: rounded rows and weights, in float32."""
    linears = list(products)
    fake_quantise(linears)
    for linear in linears:
        linear.register_forward_pre_hook(lambda _, given: (fake_quantise_rows(given[0]),))


def language_linears(language_model: Any, lm_head: Any) -> list[nn.Linear]:
    """All linear layers of a language model, including the head."""
    return [lm_head, *layer_linears(language_model)]


def layer_linears(language_model: Any) -> list[nn.Linear]:
    """All linear layers of a language model, without the head."""
    return [linear for layer in language_model.layers for linears in linears_by_product(layer) for linear in linears]


def vision_linears(model: Any) -> list[nn.Linear]:
    """All linear layers of vision tower and projector."""
    language = set(model.model.language_model.modules())
    found = (module for module in model.model.modules() if module not in language)
    return [module for module in found if type(module) is nn.Linear]
