"""The language model as one lean loop over fused weights: ragged batches of rows, each against its own cache.

transformers' modules stay the reference (tests compare logits and ids); this walk exists because a small model's
step is dominated by per-operation overhead, and because rows of many requests must share one matrix product.
It covers dense decoders of the Llama shape: RMSNorm, rotary grouped-query attention (with or without biases and
query/key norms), SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vidspec_models.attention import CausalMasks
from vidspec_models.decoder_weights import WalkWeights, fuse_all, fused_weights, require_supported
from vidspec_models.errors import ContextOverflow
from vidspec_models.kv_cache import CacheGeometry
from vidspec_models.norm import eps_operand, rms_norm
from vidspec_models.placement import LayerSpan
from vidspec_models.product import Product
from vidspec_models.row_invariance import RowRule, StepShapes, find_row_rule
from vidspec_models.stage import HeadShape, QueryObserver, Segment, Stage

__all__ = ["Decoder", "QueryObserver", "Segment"]  # a forward and its arguments


class Decoder:
    """Stateless apart from its weights; every call is under `torch.inference_mode` of the caller.

    One stage for each device. Rows, their rotary values and additions come from the first device, logits from the
    last; the stages fetch what they need.
    """

    def __init__(
        self,
        language_model: Any,
        lm_head: Any,
        context_length: int,
        *,
        row_rule: RowRule | None = None,
        releases_layers: bool = False,
        spans: Sequence[LayerSpan] = (),
    ) -> None:
        """`row_rule` is measured where none is given. `releases_layers` takes each layer out of the language model
        once it is fused: no weight is held twice. `spans` says where the layers go, if not to the embedding's device.
        """
        config, layers = language_model.config, language_model.layers
        require_supported(config, language_model)
        attention = layers[0].self_attn
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.context_length = context_length
        self.embedding: Tensor = language_model.embed_tokens.weight.detach()
        dtype, device = self.embedding.dtype, self.embedding.device
        spans = tuple(spans) or (LayerSpan(device, range(len(layers))),)
        head, last = lm_head.weight.detach(), spans[-1].device
        self.row_rule = row_rule or self._measured_rule(layers, head, spans)
        self.weights = WalkWeights(
            layers=list(fuse_all(layers, self.row_rule.form, spans, releases=releases_layers)),
            final_norm=language_model.norm.weight.detach().to(last),
            head=Product(head.to(last), self.row_rule.form),
            eps=config.rms_norm_eps,
        )
        self._eps = eps_operand(config.rms_norm_eps)
        self.geometry = CacheGeometry(
            num_layers=len(layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            context_block=self.row_rule.context_block,
            split=spans if len(spans) > 1 else (),
        )
        self._stages = [self._stage(number, span) for number, span in enumerate(spans)]
        self._rotary = torch.stack(
            self.rotary_from(language_model.rotary_emb, torch.arange(context_length, device=device)[None]), dim=1
        )  # [positions, 2, 1, D]

    def _stage(self, number: int, span: LayerSpan) -> Stage:
        block, dtype = self.row_rule.context_block, self.embedding.dtype
        group = self.num_heads // self.num_kv_heads
        return Stage(
            number,
            span,
            [self.weights.layers[index] for index in span.layers],
            HeadShape(
                num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, scale=self.scale
            ),
            CausalMasks(self.context_length + block, block, group, dtype, span.device, self.row_rule.attention_lines),
            self.row_rule,
        )

    def _measured_rule(self, layers: Any, head: Tensor, spans: Sequence[LayerSpan]) -> RowRule:
        """On every device; it holds only where all of them agree."""
        devices = dict.fromkeys(span.device for span in spans)
        rules = [find_row_rule(self._step_shapes(layers, head, device)) for device in devices]
        return replace(rules[0], holds=rules[0].holds and rules.count(rules[0]) == len(rules))

    def _step_shapes(self, layers: Any, head: Tensor, device: torch.device) -> StepShapes:
        weights = [weight.to(device) for weight in fused_weights(layers[0])]
        return StepShapes(
            weights=(*weights, head.to(device)),
            num_bytes=len(layers) * sum(weight.nbytes for weight in weights) + head.nbytes,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    def rotary_from(self, rotary_emb: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [n, 1, D] for explicit position ids, by the family's own rotary module."""
        cos, sin = rotary_emb(self.embedding, position_ids)
        half = self.head_dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # rotate_half(x)*sin = roll(x)*signed
        return cos.reshape(-1, 1, self.head_dim), signed.reshape(-1, 1, self.head_dim)

    @property
    def rotary_tables(self) -> Tensor:
        """cos and signed sin [positions, 2, D] of every plain text position."""
        return self._rotary.squeeze(2)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [n, 1, D] for plain text positions (int64 [n])."""
        cos, sin = self._rotary.index_select(0, positions).unbind(1)
        return cos, sin

    def require_room(self, num_tokens: int) -> None:
        """Raise ContextOverflow for a prompt that leaves no position to an answer."""
        if num_tokens >= self.context_length:
            raise ContextOverflow(
                f"the prompt has {num_tokens} tokens, the model's context is {self.context_length}; shorten it"
            )

    def prompt_rotary(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of plain positions 0..num_tokens."""
        cos, sin = self._rotary[:num_tokens].unbind(1)
        return cos, sin

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [n, hidden size] of int64 [n]."""
        return self.embedding.index_select(0, ids)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segments: list[Segment],
        additions: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """Run all layers, or the first `num_layers`. hidden [n, hidden size], rows as in the segments; same back.

        `additions[i]` [n, hidden size] is added after layer i. Writes every row's keys and values into its cache;
        advancing the caches' lengths is the caller's. `observer` is shown every layer's queries.
        """
        num_rows = hidden.shape[0]
        hidden = self.row_rule.pad(hidden)
        for stage in self._stages:
            if num_layers is None or stage.layers.start < num_layers:
                hidden = stage.forward(hidden, rotary, segments, additions, observer, num_layers)
        return hidden[:num_rows]

    def step(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at plain rotary `positions`, rows in the order of the segments."""
        ids_and_positions = torch.tensor((ids, positions), device=self.embedding.device)
        return self.logits(self.forward(self.embed(ids_and_positions[0]), self.rotary(ids_and_positions[1]), segments))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [n, V] of final hidden rows [n, hidden size]."""
        num_rows = hidden.shape[0]
        return self.weights.head(rms_norm(self.row_rule.pad(hidden), self.weights.final_norm, self._eps))[:num_rows]
