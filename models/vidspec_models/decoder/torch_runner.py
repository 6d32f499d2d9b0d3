"""TorchRunner: a language model as one lean loop over fused weights, with torch's operators.

It takes ragged batches of rows, each against its own cache. transformers' modules stay the reference (tests compare
logits and ids). This loop exists because per-operation overhead dominates a small model's step, and because rows of
many requests must share one matrix product. It supports dense decoders of the Llama shape: RMSNorm, rotary
grouped-query attention (with or without biases and query/key norms), SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.decoder.batch_invariant_ops import CausalMasks, attend, attend_causally, rms_norm
from vidspec_models.decoder.decoder import Decoder, QueryObserver, Segment
from vidspec_models.decoder.kv_cache import HiddenRows, LayerSpan
from vidspec_models.decoder.weights import LayerWeights

# One layer's views for one segment of a forward: its rows; where their keys and values go [KV, n, D]; the keys and
# values that they attend to [1, KV, context, D]; their mask, None for plain causal attention, as for a prompt's rows.
_View = tuple[slice, Tensor, Tensor, Tensor, Tensor, Tensor | None]


class TorchRunner:
    """Stateless apart from its weights; the caller must be in `torch.inference_mode`.

    Rows, rotary values and deepstack features are on the first layer's device, logits on the last layer's. In between,
    rows are moved to each layer's device.
    """

    is_chunk_invariant = False

    def __init__(self, decoder: Decoder) -> None:
        self._weights, self._geometry = decoder.weights, decoder.geometry
        self._rule = rule = decoder.batch_invariance
        self._num_heads, self._scale = decoder.num_heads, decoder.scale
        self._spans = decoder.geometry.spans
        block, group = rule.context_block, decoder.num_heads // decoder.geometry.num_kv_heads
        self._masks = [
            CausalMasks(decoder.context_length + block, block, group, decoder.geometry.dtype, span.device)
            for span in self._spans
        ]
        self._attend_chunk = rule.attend_chunk or attend_causally
        self._eps = torch.full((1, 1, 1), decoder.weights.eps)

    def step(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at plain rotary `positions`, rows in the order of the segments."""
        ids_and_positions = torch.tensor((ids, positions), device=self._weights.embedding.device)
        return self.logits(self.forward(*self._weights.rows(*ids_and_positions), segments))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [n, V] of final hidden rows [n, hidden size]."""
        assert self._weights.head is not None
        num_rows, padded = hidden.shape[0], self._rule.pad(hidden)
        return self._weights.head(rms_norm(padded, self._weights.final_norm, self._eps))[:num_rows]

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segments: list[Segment],
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """Run all layers, or the first `num_layers`, on hidden [n, hidden size], rows as in the segments; same back.

        Not possible where kernels compute both prompts and steps: then there are no layers here.

        `deepstack[i]` [n, hidden size] is added after layer i. Writes every row's keys and values into its cache; the
        caller advances the caches' lengths. `observer` is called with every layer's queries. The host does not wait for
        copies between GPUs: the devices order them with the work on both sides.
        """
        num_rows, last = hidden.shape[0], self._geometry.num_layers if num_layers is None else num_layers
        hidden = self._rule.pad(hidden)
        for number, span in enumerate(self._spans):
            if span.layers.start >= last:
                break
            hidden, rotary = hidden.to(span.device), (rotary[0].to(span.device), rotary[1].to(span.device))
            for index, views in zip(span.layers, self._views(number, segments), strict=True):
                if index == last:
                    break
                layer = self._weights.layers[index]
                queries, keys, values = self._heads(layer, rms_norm(hidden, layer.attention_norm, self._eps), rotary)
                if observer is not None:
                    observer.note(index, queries[observer.first :])
                hidden = layer.output.added_to(hidden, self._attended(queries, keys, values, views))
                gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self._eps)).chunk(2, dim=-1)
                hidden = layer.down.added_to(hidden, functional.silu(gate).mul_(up))
                if index < len(deepstack):
                    hidden[:num_rows] += deepstack[index].to(span.device)
        return hidden[:num_rows]

    def prefill(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segment: Segment,
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_wanted: int = 1,
    ) -> Tensor:
        """As `PromptRunner.prefill`."""
        return self.forward(hidden, rotary, [segment], deepstack, observer)[len(hidden) - num_wanted :]

    def observe(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segment: Segment, observer: QueryObserver, num_layers: int
    ) -> None:
        """As `PromptRunner.observe`."""
        self.forward(hidden, rotary, [segment], observer=observer, num_layers=num_layers)

    def _heads(
        self, layer: LayerWeights, normed: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, H, D] and keys [n, KV, D], values [n, KV, D]; `normed` may have padding rows."""
        num_heads, num_kv_heads, head_dim = self._num_heads, self._geometry.num_kv_heads, self._geometry.head_dim
        product = layer.qkv(normed, layer.qkv_bias)
        cos, sin = rotary
        heads = product[: cos.shape[0]].view(-1, num_heads + 2 * num_kv_heads, head_dim)
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.query_key_norm is not None:
            rotated = functional.rms_norm(rotated, (head_dim,), None, self._weights.eps) * layer.query_key_norm
        rotated = torch.addcmul(rotated * cos, rotated.roll(head_dim // 2, -1), sin)
        queries, keys = rotated.split((num_heads, num_kv_heads), dim=1)
        return queries, keys, values

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, views: Sequence[_View]) -> Tensor:
        """Write the segments' keys and values, then attend; returns [n, H * D], padded."""
        outputs, dtype = [], queries.dtype
        queries = queries.to(self._geometry.dtype)
        for rows, new_keys, new_values, cached_keys, cached_values, mask in views:
            new_keys.copy_(keys[rows].transpose(0, 1))
            new_values.copy_(values[rows].transpose(0, 1))
            if mask is None:
                outputs.append(self._attend_chunk(queries[rows], cached_keys, cached_values, self._scale))
            else:
                outputs.append(attend(queries[rows], cached_keys, cached_values, mask, self._scale))
        return self._rule.pad(outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype)

    def _views(self, number: int, segments: Sequence[Segment]) -> list[tuple[_View, ...]]:
        """For each layer of a span, its views for every segment; made once per forward."""
        span, masks = self._spans[number], self._masks[number]
        # Torch's CPU kernel needs a mask; our own kernel and CUDA's flash kernel mask a prompt's rows themselves.
        masks_chunks = self._rule.attend_chunk is None and span.device.type != "cuda"
        if self._rule.attends_alone:
            segments = [part for segment in segments for part in segment.rows()]
        found, row = [], 0
        for segment in segments:
            start, stop = segment.start, segment.start + segment.num_rows
            keys, values = segment.cache.keys_by_span[number], segment.cache.values_by_span[number]
            hidden = segment.cache.hidden
            is_chunk = not masks_chunks and hidden is None and segment.is_of_prompt
            is_unmasked = is_chunk or (start == 0 and stop > 1)
            context = stop if is_unmasked else masks.padded(stop)
            mask = None if is_unmasked else masks.rows(start, segment.num_rows)
            whole, skipped, closed = len(span.layers), 0, mask  # layers without hidden rows; the others' offset, mask
            if hidden is not None and mask is not None:
                whole, skipped, closed = _without(hidden, span, mask, self._rule.context_block)
            view = (
                repeat(slice(row, row + segment.num_rows), len(span.layers)),
                keys[:, 0, :, start:stop].unbind(0),
                values[:, 0, :, start:stop].unbind(0),
                _visible(keys, context, whole, skipped),
                _visible(values, context, whole, skipped),
                (mask,) * whole + (closed,) * (len(span.layers) - whole),
            )
            found.append(zip(*view, strict=True))
            row += segment.num_rows
        return list(zip(*found, strict=True))


def _visible(stored: Tensor, context: int, whole: int, skipped: int) -> tuple[Tensor, ...]:
    """The part of a cache that each layer reads: the whole context; from layer `whole` on without `skipped` rows."""
    return (*stored[:whole, :, :, :context].unbind(0), *stored[whole:, :, :, skipped:context].unbind(0))


def _without(hidden: HiddenRows, span: LayerSpan, mask: Tensor, block: int) -> tuple[int, int, Tensor]:
    """For a span: number of layers that see every row; rows that the others' attention skips; the others' mask.

    Hidden rows in whole blocks are skipped; the rest is masked, with a large negative number instead of -inf: a kernel
    whose first part is all -inf would produce NaN.
    """
    whole = len(range(span.layers.start, min(hidden.first_layer, span.layers.stop)))
    skipped = hidden.count // block * block
    closed = mask[:, skipped:].clone()
    closed[:, : hidden.count - skipped] = torch.finfo(mask.dtype).min / 4
    return whole, skipped, closed
