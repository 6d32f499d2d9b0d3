"""The language model as one lean loop over fused weights: ragged batches of rows, each against its own cache.

transformers' modules stay the reference (tests compare logits and ids); this walk exists because a small model's
step is dominated by per-operation overhead, and because rows of many requests must share one matrix product.
It covers dense decoders of the Llama shape: RMSNorm, rotary grouped-query attention (with or without biases and
query/key norms), SwiGLU. Weights are stored transposed ([K, N]), query/key/value and gate/up fused: the layout
in which the CPU's matrix products are row-invariant and fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.attention import attend, causal_mask
from vidspec_models.errors import ModelLoadError
from vidspec_models.kv_cache import CacheGeometry, KVCache
from vidspec_models.row_invariance import RowRule, StepShapes, find_row_rule


@dataclass(slots=True)
class Segment:
    """Consecutive rows of one sequence in a forward: cache rows start..start+num_rows are (over)written."""

    cache: KVCache
    start: int
    num_rows: int


@dataclass(slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor  # [hidden, (H + 2 KV) * D]
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor  # [H * D, hidden]
    mlp_norm: Tensor
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


class Decoder:
    """Stateless apart from its weights; every call is under `torch.inference_mode` of the caller."""

    def __init__(self, language_model: Any, lm_head: Any, context_length: int) -> None:
        config = language_model.config
        _require_supported(config, language_model)
        attention = language_model.layers[0].self_attn
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.eps: float = config.rms_norm_eps
        self.context_length = context_length
        self.embedding: Tensor = language_model.embed_tokens.weight.detach()
        self._layers = [_fuse(layer) for layer in language_model.layers]
        self._final_norm: Tensor = language_model.norm.weight.detach()
        self._head: Tensor = _transposed(lm_head.weight)
        self._cos, self._sin = self._rotary_table(language_model, context_length)
        self.row_rule: RowRule = find_row_rule(self._step_shapes())
        self.geometry = CacheGeometry(
            num_layers=len(self._layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.embedding.dtype,
            device=self.embedding.device,
            context_block=self.row_rule.context_block,
        )

    def _step_shapes(self) -> StepShapes:
        layer = self._layers[0]
        weights = (layer.qkv, layer.output, layer.gate_up, layer.down, self._head)
        return StepShapes(
            weights=weights, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def _rotary_table(self, language_model: Any, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.embedding.device)[None]
        return self.rotary_from(language_model.rotary_emb, positions)

    def rotary_from(self, rotary_emb: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [n, 1, D] for explicit position ids, by the family's own rotary module."""
        cos, sin = rotary_emb(self.embedding, position_ids)
        half = self.head_dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # rotate_half(x)*sin = roll(x)*signed
        return cos.reshape(-1, 1, self.head_dim), signed.reshape(-1, 1, self.head_dim)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [n, 1, D] for plain text positions (int64 [n])."""
        return self._cos[positions], self._sin[positions]

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segments: list[Segment]) -> Tensor:
        """Run all layers. hidden [n, hidden size], rows in the order of the segments; returns the same shape.

        Writes every row's keys and values into its cache; advancing the caches' lengths is the caller's.
        """
        masks = [self._mask(segment) for segment in segments]
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, self.eps)
            mixed = self._attention(index, layer, normed, rotary, segments, masks)
            hidden = torch.addmm(hidden, mixed, layer.output)
            normed = functional.rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, self.eps)
            gate, up = torch.mm(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [n, V] of final hidden rows [n, hidden size]."""
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._final_norm, self.eps)
        return torch.mm(normed, self._head)

    def _mask(self, segment: Segment) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        block = self.row_rule.context_block
        return causal_mask(segment.start, segment.num_rows, block, group, self.embedding.dtype, self.embedding.device)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        normed: Tensor,
        rotary: tuple[Tensor, Tensor],
        segments: list[Segment],
        masks: list[Tensor],
    ) -> Tensor:
        qkv = torch.mm(normed, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        turned, values = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = torch.cat(
                (
                    functional.rms_norm(turned[:, : self.num_heads], (self.head_dim,), layer.query_norm, self.eps),
                    functional.rms_norm(turned[:, self.num_heads :], (self.head_dim,), layer.key_norm, self.eps),
                ),
                dim=1,
            )
        cos, sin = rotary
        turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        outputs, row = [], 0
        for segment, mask in zip(segments, masks, strict=True):
            rows = slice(row, row + segment.num_rows)
            row += segment.num_rows
            keys, cached = segment.cache.keys[index], segment.cache.values[index]
            keys[:, segment.start : segment.start + segment.num_rows] = turned[rows, self.num_heads :].transpose(0, 1)
            cached[:, segment.start : segment.start + segment.num_rows] = values[rows].transpose(0, 1)
            outputs.append(attend(turned[rows, : self.num_heads], keys, cached, mask, self.scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _require_supported(config: Any, language_model: Any) -> None:
    if config.hidden_act != "silu":
        raise ModelLoadError(f"activation {config.hidden_act!r} is not supported; this decoder computes SwiGLU")
    if not hasattr(language_model.layers[0].mlp, "gate_proj"):
        raise ModelLoadError("mixture-of-experts language models are not supported; choose a dense checkpoint")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ModelLoadError("sliding-window layers are not supported; choose a full-attention checkpoint")


def _transposed(*weights: Tensor) -> Tensor:
    return torch.cat([weight.detach() for weight in weights]).t().contiguous()


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections]
    return _Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=_transposed(*(projection.weight for projection in projections)),
        qkv_bias=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        output=_transposed(attention.o_proj.weight),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_transposed(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=_transposed(mlp.down_proj.weight),
    )
