"""Stage: consecutive layers of a decoder on one device, and the walk of ragged rows through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.attention import CausalMasks, attend, attend_causally
from vidspec_models.decoder_weights import LayerWeights
from vidspec_models.kv_cache import HiddenRows, KVCache
from vidspec_models.norm import eps_operand, rms_norm
from vidspec_models.placement import LayerSpan
from vidspec_models.row_invariance import RowRule

_MOST_STEP_ROWS = 64  # beyond, rows are a prompt's: no mask needed, as nobody compares their bits
QueryObserver = Callable[[int, Tensor], None]  # layer index, its rotated queries [n, H, D]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a forward: cache rows start..start+num_rows are (over)written."""

    cache: KVCache
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Grouped-query attention: H query heads on KV key/value heads of width D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Views:
    """A segment's slices of its cache, per layer, and its mask: made once a forward, used in every layer."""

    rows: slice
    new_keys: tuple[Tensor, ...]  # [KV, n, D]
    new_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]  # [1, KV, context, D]
    values: tuple[Tensor, ...]
    masks: tuple[Tensor | None, ...]  # None: plainly causal, as a prompt's rows are


class Stage:
    """Stateless apart from its weights. `number` says which of a cache's extents is its own."""

    def __init__(
        self,
        number: int,
        span: LayerSpan,
        weights: Sequence[LayerWeights],
        heads: HeadShape,
        masks: CausalMasks,
        row_rule: RowRule,
    ) -> None:
        self.layers = span.layers
        self._number = number
        self._device = span.device
        self._weights = weights
        self._heads = heads
        self._masks = masks
        self._row_rule = row_rule
        self._attend_chunk = row_rule.attend_chunk or attend_causally
        self._masks_chunks = row_rule.attend_chunk is None and span.device.type != "cuda"  # as torch's CPU kernel needs
        self._eps = eps_operand(weights[0].norm_eps)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        additions: Sequence[Tensor],
        observer: QueryObserver | None,
        num_layers: int | None,
    ) -> Tensor:
        """Run its layers, or those below layer `num_layers`. Arguments as of `Decoder.forward`, from any device.

        hidden is padded as the row rule wants, and comes back so, on this stage's device. Between GPUs the copies wait
        for nobody: they are ordered with the work on both sides by the devices themselves.
        """
        num_rows = rotary[0].shape[0]
        hidden, rotary = hidden.to(self._device), (rotary[0].to(self._device), rotary[1].to(self._device))
        views = self._views(segments)
        for place, layer in enumerate(self._weights):
            index = self.layers[place]
            if index == num_layers:
                break
            normed = rms_norm(hidden, layer.attention_norm, self._eps)
            mixed = self._attention(place, layer, normed, rotary, views, observer)
            hidden = layer.output.added_to(hidden, mixed)
            gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self._eps)).chunk(2, dim=-1)
            hidden = layer.down.added_to(hidden, functional.silu(gate).mul_(up))
            if index < len(additions):
                hidden[:num_rows] += additions[index].to(self._device)
        return hidden

    def _views(self, segments: Sequence[Segment]) -> list[_Views]:
        views, row = [], 0
        for segment in segments:
            start, stop = segment.start, segment.start + segment.num_rows
            extent, hidden = segment.cache.extents[self._number], segment.cache.hidden
            keys, values = extent.keys, extent.values
            is_chunk = not self._masks_chunks and hidden is None and segment.num_rows > _MOST_STEP_ROWS
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
        skipped, whole = self._masks.num_skipped(hidden.count), self._num_below(hidden.first_layer)
        return (*stored[:whole, :, :, :context].unbind(0), *stored[whole:, :, :, skipped:context].unbind(0))

    def _layer_masks(self, mask: Tensor | None, hidden: HiddenRows | None) -> tuple[Tensor | None, ...]:
        if mask is None or hidden is None:
            return (mask,) * len(self.layers)
        closed, whole = self._masks.beyond(mask, hidden.count), self._num_below(hidden.first_layer)
        return (mask,) * whole + (closed,) * (len(self.layers) - whole)

    def _num_below(self, layer: int) -> int:
        """How many of its layers come before this one."""
        return min(max(0, layer - self.layers.start), len(self.layers))

    def _attention(
        self,
        place: int,
        layer: LayerWeights,
        normed: Tensor,
        rotary: tuple[Tensor, Tensor],
        views: list[_Views],
        observer: QueryObserver | None,
    ) -> Tensor:
        num_heads, num_kv_heads, head_dim = self._heads.num_heads, self._heads.num_kv_heads, self._heads.head_dim
        product = layer.qkv(normed, layer.qkv_bias)
        cos, sin = rotary
        heads = product[: cos.shape[0]].view(-1, num_heads + 2 * num_kv_heads, head_dim)
        turned, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.query_key_norm is not None:
            turned = functional.rms_norm(turned, (head_dim,), None, layer.norm_eps) * layer.query_key_norm
        turned = torch.addcmul(turned * cos, turned.roll(head_dim // 2, -1), sin)
        queries, keys = turned.split((num_heads, num_kv_heads), dim=1)
        if observer is not None:
            observer(self.layers[place], queries)
        outputs = []
        for view in views:
            view.new_keys[place].copy_(keys[view.rows].transpose(0, 1))
            view.new_values[place].copy_(values[view.rows].transpose(0, 1))
            outputs.append(self._attend(queries[view.rows], view.keys[place], view.values[place], view.masks[place]))
        return self._row_rule.pad(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return self._attend_chunk(queries, keys, values, self._heads.scale)
        return attend(queries, keys, values, mask, self._heads.scale)
