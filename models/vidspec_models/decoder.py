"""The language model as one lean loop over fused weights: ragged batches of rows, each against its own cache.

transformers' modules stay the reference (tests compare logits and ids); this walk exists because a small model's
step is dominated by per-operation overhead, and because rows of many requests must share one matrix product.
It covers dense decoders of the Llama shape: RMSNorm, rotary grouped-query attention (with or without biases and
query/key norms), SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.attention import CausalMasks, attend, attend_causally
from vidspec_models.decoder_weights import LayerWeights, WalkWeights, fuse_all, fused_weights, require_supported
from vidspec_models.errors import ContextOverflow
from vidspec_models.kv_cache import CacheGeometry, HiddenRows, KVCache
from vidspec_models.norm import rms_norm
from vidspec_models.product import Product
from vidspec_models.row_invariance import RowRule, StepShapes, find_row_rule

_MOST_STEP_ROWS = 64  # beyond, rows are a prompt's: no mask needed, as nobody compares their bits
QueryObserver = Callable[[int, Tensor], None]  # layer index, its rotated queries [n, H, D]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a forward: cache rows start..start+num_rows are (over)written."""

    cache: KVCache
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Views:
    """A segment's slices of its cache, per layer, and its mask: made once a forward, used in every layer."""

    rows: slice
    new_keys: tuple[Tensor, ...]  # [KV, n, D]
    new_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]  # [1, KV, context, D]
    values: tuple[Tensor, ...]
    masks: tuple[Tensor | None, ...]  # None: plainly causal, as a sequence's first rows are


class Decoder:
    """Stateless apart from its weights; every call is under `torch.inference_mode` of the caller."""

    def __init__(
        self,
        language_model: Any,
        lm_head: Any,
        context_length: int,
        *,
        row_rule: RowRule | None = None,
        releases_layers: bool = False,
    ) -> None:
        """`row_rule` is measured where none is given. `releases_layers` takes each layer out of the language model
        once it is fused: no weight is held twice."""
        config = language_model.config
        require_supported(config, language_model)
        attention = language_model.layers[0].self_attn
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.context_length = context_length
        self.embedding: Tensor = language_model.embed_tokens.weight.detach()
        dtype, device = self.embedding.dtype, self.embedding.device
        self._eps = torch.full((1, 1, 1), config.rms_norm_eps)  # on the CPU: a kernel's argument, never waited for
        self._final_norm: Tensor = language_model.norm.weight.detach()
        head = lm_head.weight.detach()
        self.row_rule = row_rule or find_row_rule(self._step_shapes(language_model.layers, head))
        self._head = Product(head, self.row_rule.form)
        self._layers = list(fuse_all(language_model.layers, self.row_rule.form, releases=releases_layers))
        self.weights = WalkWeights(self._layers, self._final_norm, self._head, config.rms_norm_eps)  # for other walks
        block = self.row_rule.context_block
        group = self.num_heads // self.num_kv_heads
        self._masks = CausalMasks(context_length + block, block, group, dtype, device)
        self.geometry = CacheGeometry(
            num_layers=len(self._layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            context_block=block,
        )
        self._rotary = torch.stack(
            self.rotary_from(language_model.rotary_emb, torch.arange(context_length, device=device)[None]), dim=1
        )  # [positions, 2, 1, D]

    def _step_shapes(self, layers: Any, head: Tensor) -> StepShapes:
        weights = fused_weights(layers[0])
        return StepShapes(
            weights=(*weights, head),
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
        hidden = self._padded(hidden)
        views = self._views(segments)
        for index, layer in enumerate(self._layers[:num_layers]):
            normed = rms_norm(hidden, layer.attention_norm, self._eps)
            mixed = self._attention(index, layer, normed, rotary, views, observer)
            hidden = layer.output.added_to(hidden, mixed)
            gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self._eps)).chunk(2, dim=-1)
            hidden = layer.down.added_to(hidden, functional.silu(gate).mul_(up))
            if index < len(additions):
                hidden[:num_rows] += additions[index]
        return hidden[:num_rows]

    def step(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at plain rotary `positions`, rows in the order of the segments."""
        ids_and_positions = torch.tensor((ids, positions), device=self.embedding.device)
        return self.logits(self.forward(self.embed(ids_and_positions[0]), self.rotary(ids_and_positions[1]), segments))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [n, V] of final hidden rows [n, hidden size]."""
        num_rows = hidden.shape[0]
        return self._head(rms_norm(self._padded(hidden), self._final_norm, self._eps))[:num_rows]

    def _padded(self, rows: Tensor) -> Tensor:
        """Repeat the last row up to what the row rule wants."""
        missing = self.row_rule.padded(rows.shape[0]) - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows[-1:].expand(missing, -1)))

    def _views(self, segments: list[Segment]) -> list[_Views]:
        views, row = [], 0
        for segment in segments:
            start, stop = segment.start, segment.start + segment.num_rows
            keys, values, hidden = segment.cache.keys, segment.cache.values, segment.cache.hidden
            is_chunk = keys.is_cuda and hidden is None and segment.num_rows > _MOST_STEP_ROWS
            is_unmasked = is_chunk or (start == 0 and stop > 1)
            context = stop if is_unmasked else self._masks.padded(stop)
            mask = None if is_unmasked else self._masks.rows(start, segment.num_rows)
            views.append(
                _Views(
                    rows=slice(row, row + segment.num_rows),
                    new_keys=keys[:, 0, :, start:stop].unbind(0),
                    new_values=values[:, 0, :, start:stop].unbind(0),
                    keys=self._attended(keys, context, hidden),
                    values=self._attended(values, context, hidden),
                    masks=self._layer_masks(mask, hidden),
                )
            )
            row += segment.num_rows
        return views

    def _attended(self, stored: Tensor, context: int, hidden: HiddenRows | None) -> tuple[Tensor, ...]:
        """What each layer reads of a cache: all of its context, or, where rows are hidden, what lies behind them."""
        if hidden is None:
            return stored[:, :, :, :context].unbind(0)
        skipped, first = self._masks.num_skipped(hidden.count), hidden.first_layer
        return (*stored[:first, :, :, :context].unbind(0), *stored[first:, :, :, skipped:context].unbind(0))

    def _layer_masks(self, mask: Tensor | None, hidden: HiddenRows | None) -> tuple[Tensor | None, ...]:
        num_layers = len(self._layers)
        if mask is None or hidden is None:
            return (mask,) * num_layers
        closed = self._masks.beyond(mask, hidden.count)
        return (mask,) * hidden.first_layer + (closed,) * (num_layers - hidden.first_layer)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        rotary: tuple[Tensor, Tensor],
        views: list[_Views],
        observer: QueryObserver | None,
    ) -> Tensor:
        product = layer.qkv(normed, layer.qkv_bias)
        cos, sin = rotary
        heads = product[: cos.shape[0]].view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        turned, values = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if layer.query_key_norm is not None:
            turned = functional.rms_norm(turned, (self.head_dim,), None, layer.norm_eps) * layer.query_key_norm
        turned = torch.addcmul(turned * cos, turned.roll(self.head_dim // 2, -1), sin)
        queries, keys = turned.split((self.num_heads, self.num_kv_heads), dim=1)
        if observer is not None:
            observer(index, queries)
        outputs = []
        for view in views:
            view.new_keys[index].copy_(keys[view.rows].transpose(0, 1))
            view.new_values[index].copy_(values[view.rows].transpose(0, 1))
            outputs.append(self._attend(queries[view.rows], view.keys[index], view.values[index], view.masks[index]))
        return self._padded(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return attend_causally(queries, keys, values, self.scale)
        return attend(queries, keys, values, mask, self.scale)
