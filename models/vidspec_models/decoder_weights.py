"""A decoder layer's weights, fused and laid out for the matrix products of a step.

Stored transposed ([K, N]): in that layout CPU products are row-invariant and fastest (ADR 0004).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vidspec_models.errors import ModelLoadError
from vidspec_models.product import Product


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of a Llama-shaped decoder with H query heads, KV key/value heads of width D."""

    attention_norm: Tensor
    qkv: Product  # [hidden, (H + 2 KV) * D]
    qkv_bias: Tensor | None
    query_key_norm: Tensor | None  # [H + KV, D]
    norm_eps: float
    output: Product  # [H * D, hidden]
    mlp_norm: Tensor
    gate_up: Product  # [hidden, 2 * intermediate]
    down: Product  # [intermediate, hidden]


def fuse(layer: Any, max_inner: int | None = None) -> LayerWeights:
    """The fused weights of a transformers decoder layer; `max_inner` as in `Product`."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections]
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=Product(transposed(*(projection.weight for projection in projections)), max_inner),
        qkv_bias=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        query_key_norm=_query_key_norm(attention),
        norm_eps=layer.input_layernorm.variance_epsilon,
        output=Product(transposed(attention.o_proj.weight), max_inner),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=Product(transposed(mlp.gate_proj.weight, mlp.up_proj.weight), max_inner),
        down=Product(transposed(mlp.down_proj.weight), max_inner),
    )


def transposed(*weights: Tensor) -> Tensor:
    """Linear weights [N_i, K] as one contiguous [K, sum N_i]."""
    return torch.cat([weight.detach() for weight in weights]).t().contiguous()


def _query_key_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
    norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return torch.cat([norm.expand(count, -1) for norm, count in zip(norms, heads, strict=True)])


def require_supported(config: Any, language_model: Any) -> None:
    """Raise ModelLoadError for what the decoder's walk does not compute."""
    if config.hidden_act != "silu":
        raise ModelLoadError(f"activation {config.hidden_act!r} is not supported; this decoder computes SwiGLU")
    if not hasattr(language_model.layers[0].mlp, "gate_proj"):
        raise ModelLoadError("mixture-of-experts language models are not supported; choose a dense checkpoint")
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None if not kinds else set(kinds) != {"full_attention"}
    if slides:
        raise ModelLoadError("sliding-window layers are not supported; choose a full-attention checkpoint")
    if any(projection.bias is not None for projection in _unbiased(language_model.layers[0])):
        raise ModelLoadError("biases outside the query, key and value projections are not supported")


def _unbiased(layer: Any) -> tuple[Any, ...]:
    return layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
