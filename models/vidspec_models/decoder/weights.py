"""A decoder's weights, fused for a step's matrix products: query/key/value as one product, and gate/up as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vidspec_models.decoder.batch_invariant_ops import BatchInvariance, Product
from vidspec_models.decoder.kv_cache import LayerSpan
from vidspec_models.decoder.quantised import plain_weight
from vidspec_models.errors import ModelLoadError

JoinedProduct = Callable[[Sequence[nn.Linear], torch.device], Product]  # of layers with the same input, on a device
_PACKING_ROWS = 8  # number of rows that the blocked layout is optimised for; any number can be multiplied

# transformers' model types of the Llama shape, with the settings that add biases to output or MLP projections.
_LANGUAGE_MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "qwen2": (),
    "qwen2_5_vl_text": (),
    "qwen2_vl_text": (),
    "qwen3": ("attention_bias",),
    "qwen3_vl_text": ("attention_bias",),
}
_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")  # not longrope: it changes as a sequence grows


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of a Llama-shaped decoder with H query heads, KV key/value heads of width D."""

    attention_norm: Tensor
    qkv: Product  # [hidden, (H + 2 KV) * D]
    qkv_bias: Tensor | None
    query_key_norm: Tensor | None  # [H + KV, D]
    output: Product  # [H * D, hidden]
    mlp_norm: Tensor
    gate_up: Product  # [hidden, 2 * intermediate]
    down: Product  # [intermediate, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole decoder. Embedding and rotary values are on the first layer's device, norm and head on the last one's."""

    embedding: Tensor  # [V, hidden]
    rotary: Tensor  # cos and signed sin of every plain position, [positions, 2, 1, D]
    layers: list[LayerWeights]  # none, and no head, where kernels compute both prompts and steps
    final_norm: Tensor
    head: Product | None  # [hidden, V]
    eps: float

    @property
    def rotary_tables(self) -> Tensor:
        """cos and signed sin [positions, 2, D] of every plain text position."""
        return self.rotary.squeeze(2)

    def rows(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Embeddings [n, hidden] of tokens, and cos and signed sin [n, 1, D] at plain positions; both int64 [n]."""
        cos, sin = self.rotary.index_select(0, positions).unbind(1)
        return self.embedding.index_select(0, ids), (cos, sin)


def fuse_all(
    layers: Any, joined: JoinedProduct, spans: Sequence[LayerSpan], *, releases: bool
) -> Iterator[LayerWeights]:
    """Fuse every layer on its device; `releases` drops each layer's original weights before the next one is fused."""
    for span in spans:
        for index in span.layers:
            yield _fuse(layers[index], joined, span.device)
            if releases:
                layers[index] = nn.Identity()


def _fuse(layer: Any, joined: JoinedProduct, device: torch.device) -> LayerWeights:
    """The fused weights of a transformers decoder layer, on `device`, which may differ from the layer's device."""
    attention = layer.self_attn
    qkv, output, gate_up, down = (joined(linears, device) for linears in linears_by_product(layer))
    bias, head_norm = query_key_value_bias(attention), query_key_norm(attention)
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach().to(device),
        qkv=qkv,
        qkv_bias=None if bias is None else bias.to(device),
        query_key_norm=None if head_norm is None else head_norm.to(device),
        output=output,
        mlp_norm=layer.post_attention_layernorm.weight.detach().to(device),
        gate_up=gate_up,
        down=down,
    )


def product_of(weight: Tensor, rule: BatchInvariance) -> Product:
    """The product with a linear weight [N, K] in the form that the rule asks for."""
    return PackedProduct(weight) if rule.is_packed else Product(weight, rule.max_inner)


class PackedProduct(Product):
    """The weight in oneDNN's blocked layout, packed once.

    Measured on a CPU without AMX: one row takes no longer than reading the weight from memory, 9 rows take 1.2 times as
    long as one, and bits are equal for every row count.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return result

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._packed, None, "add")
        return result


def joined_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """The weights [N, K] of these layers, one below the other; no copy of a single one."""
    weights = [plain_weight(linear) for linear in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def linears_by_product(layer: Any) -> tuple[list[nn.Linear], list[nn.Linear], list[nn.Linear], list[nn.Linear]]:
    """The linear layers of a transformers decoder layer: query/key/value, output, gate/up, and down."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    return qkv, [attention.o_proj], gate_up, [mlp.down_proj]


def query_key_value_bias(attention: Any) -> Tensor | None:
    """Biases [(H + 2 KV) * D]; None if the projections have none."""
    biases = [projection.bias for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return None if biases[0] is None else torch.cat([bias.detach() for bias in biases])


def query_key_norm(attention: Any) -> Tensor | None:
    """Norm weights [H + KV, D]; None unless heads are normalised before rotation."""
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
    norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return torch.cat([norm.expand(count, -1) for norm, count in zip(norms, heads, strict=True)])


def require_supported(config: Any) -> None:
    """Raise ModelLoadError for a language model's configuration that the decoder does not support."""
    if config.model_type not in _LANGUAGE_MODELS:
        raise ModelLoadError(
            f"language model {config.model_type!r} is not supported; supported: {', '.join(_LANGUAGE_MODELS)}"
        )
    if (rope_type := config.rope_parameters["rope_type"]) not in _ROPE_TYPES:
        raise ModelLoadError(f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    if config.hidden_act != "silu":
        raise ModelLoadError(f"activation {config.hidden_act!r} is not supported; this decoder computes SwiGLU")
    # Of models without kinds of layers, only Mistral has a window: others' code ignores what their files say of one.
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (config.model_type == "mistral" and config.sliding_window is not None):
        raise ModelLoadError("sliding-window layers are not supported; choose a full-attention checkpoint")
    if any(getattr(config, name) for name in _LANGUAGE_MODELS[config.model_type]):
        raise ModelLoadError("biases outside the query, key and value projections are not supported")


def context_length_of(config: Any) -> int:
    """The most positions of a language model. Files with YaRN may tell its length before, as Qwen's pages advise."""
    rope, told = config.rope_parameters, int(config.max_position_embeddings)
    if rope["rope_type"] != "yarn":
        return told
    return max(told, int((rope["factor"] or 1) * rope["original_max_position_embeddings"]))


def rotary_values(rotary_emb: Any, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [n, 1, D] for explicit position ids, by a family's own module, in the type of `like`."""
    cos, sin = rotary_emb(like, position_ids)
    half = cos.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # rotate_half(x)*sin = roll(x)*signed
    return cos.reshape(-1, 1, 2 * half), signed.reshape(-1, 1, 2 * half)
