"""The language model as one lean loop over fused weights: ragged batches of rows, each against its own cache.

transformers' modules stay the reference (tests compare logits and ids). This loop exists because per-operation overhead
dominates a small model's step, and because rows of many requests must share one matrix product. It supports dense
decoders of the Llama shape: RMSNorm, rotary grouped-query attention (with or without biases and query/key norms),
SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.batch_invariant_ops import BatchInvariance, CausalMasks, attend, attend_causally, rms_norm
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache
from vidspec_models.decoder.weights import DecoderWeights, LayerWeights
from vidspec_models.errors import ContextOverflow
from vidspec_models.step_path import TORCH_OPERATORS

_MAX_STEP_ROWS = 64  # more rows are a prompt's: attention without a mask tensor, as their bits are never compared
QueryObserver = Callable[[int, Tensor], None]  # layer index, its rotated queries [n, H, D]

# One layer's views for one segment of a forward: its rows; where their keys and values go [KV, n, D]; the keys and
# values that they attend to [1, KV, context, D]; their mask, None for plain causal attention, as for a prompt's rows.
_View = tuple[slice, Tensor, Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a forward: cache rows start..start+num_rows are (over)written."""

    cache: KVCache
    start: int
    num_rows: int

    def rows(self) -> Sequence[Segment]:
        """Each row of a step as a segment of its own; a prompt's rows together."""
        if self.start == 0 or self.num_rows > _MAX_STEP_ROWS:
            return (self,)
        return [Segment(self.cache, row, 1) for row in range(self.start, self.start + self.num_rows)]


class PromptRunner(Protocol):
    """What computes prompts: the decoder with torch's operators, or kernels."""

    is_chunk_invariant: bool  # whether a prompt's rows have the same bits however the prompt is cut into chunks

    def prefill(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segment: Segment,
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_wanted: int = 1,
    ) -> Tensor:
        """Take a prompt's rows [n, hidden size] through all layers; returns the last `num_wanted` of them.

        Deepstack features and observer as in `Decoder.forward`.
        """

    def observe(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segment: Segment, observer: QueryObserver, num_layers: int
    ) -> None:
        """Call `observer` with the queries of the first `num_layers` layers, in which keys and values are written."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of rows [n, hidden size] that `prefill` has returned."""


class Decoder:
    """Stateless apart from its weights; the caller must be in `torch.inference_mode`.

    Rows, rotary values and deepstack features are on the first layer's device, logits on the last layer's. In between,
    rows are moved to each layer's device.
    """

    is_chunk_invariant = False

    def __init__(
        self,
        weights: DecoderWeights,
        geometry: CacheGeometry,
        batch_invariance: BatchInvariance,
        num_heads: int,
        scale: float,
    ) -> None:
        """`num_heads` query heads; products of queries and keys are multiplied by `scale`. See `build_decoder`."""
        self.weights = weights
        self.geometry = geometry
        self.batch_invariance = batch_invariance
        self.step_path = TORCH_OPERATORS  # replaced if kernels compute the steps
        self.dtype_name = str(geometry.dtype).removeprefix("torch.")  # replaced if the weights have another type
        self.cores = CoreShare()
        self.num_heads = num_heads
        self.scale = scale
        self.embedding = weights.embedding
        self.context_length = weights.rotary.shape[0]
        self._spans = geometry.spans
        block, group = batch_invariance.context_block, num_heads // geometry.num_kv_heads
        self._masks = [
            CausalMasks(self.context_length + block, block, group, geometry.dtype, span.device) for span in self._spans
        ]
        self._attend_chunk = batch_invariance.attend_chunk or attend_causally
        self._eps = torch.full((1, 1, 1), weights.eps)
        self.prompts: PromptRunner = self  # replaced if kernels compute prompts

    def prompt_rotary(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of plain positions 0..num_tokens."""
        cos, sin = self.weights.rotary[:num_tokens].unbind(1)
        return cos, sin

    def require_room(self, num_tokens: int) -> None:
        """Raise ContextOverflow for a prompt that leaves no position to an answer."""
        if num_tokens >= self.context_length:
            raise ContextOverflow(
                f"the prompt has {num_tokens} tokens, but the model's context is {self.context_length}; "
                "shorten the prompt"
            )

    def step(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at plain rotary `positions`, rows in the order of the segments."""
        ids_and_positions = torch.tensor((ids, positions), device=self.embedding.device)
        return self.logits(self.forward(*self.weights.rows(*ids_and_positions), segments))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [n, V] of final hidden rows [n, hidden size]."""
        assert self.weights.head is not None
        num_rows, padded = hidden.shape[0], self.batch_invariance.pad(hidden)
        return self.weights.head(rms_norm(padded, self.weights.final_norm, self._eps))[:num_rows]

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

        Not possible where kernels compute both prompts and steps: then the decoder has no layers.

        `deepstack[i]` [n, hidden size] is added after layer i. Writes every row's keys and values into its cache; the
        caller advances the caches' lengths. `observer` is called with every layer's queries. The host does not wait for
        copies between GPUs: the devices order them with the work on both sides.
        """
        num_rows, last = hidden.shape[0], self.geometry.num_layers if num_layers is None else num_layers
        hidden = self.batch_invariance.pad(hidden)
        for number, span in enumerate(self._spans):
            if span.layers.start >= last:
                break
            hidden, rotary = hidden.to(span.device), (rotary[0].to(span.device), rotary[1].to(span.device))
            for index, views in zip(span.layers, self._views(number, segments), strict=True):
                if index == last:
                    break
                layer = self.weights.layers[index]
                queries, keys, values = self._heads(layer, rms_norm(hidden, layer.attention_norm, self._eps), rotary)
                if observer is not None:
                    observer(index, queries)
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
        num_heads, num_kv_heads, head_dim = self.num_heads, self.geometry.num_kv_heads, self.geometry.head_dim
        product = layer.qkv(normed, layer.qkv_bias)
        cos, sin = rotary
        heads = product[: cos.shape[0]].view(-1, num_heads + 2 * num_kv_heads, head_dim)
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.query_key_norm is not None:
            rotated = functional.rms_norm(rotated, (head_dim,), None, layer.norm_eps) * layer.query_key_norm
        rotated = torch.addcmul(rotated * cos, rotated.roll(head_dim // 2, -1), sin)
        queries, keys = rotated.split((num_heads, num_kv_heads), dim=1)
        return queries, keys, values

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, views: Sequence[_View]) -> Tensor:
        """Write the segments' keys and values, then attend; returns [n, H * D], padded."""
        outputs, dtype = [], queries.dtype
        queries = queries.to(self.geometry.dtype)
        for rows, new_keys, new_values, cached_keys, cached_values, mask in views:
            new_keys.copy_(keys[rows].transpose(0, 1))
            new_values.copy_(values[rows].transpose(0, 1))
            if mask is None:
                outputs.append(self._attend_chunk(queries[rows], cached_keys, cached_values, self.scale))
            else:
                outputs.append(attend(queries[rows], cached_keys, cached_values, mask, self.scale))
        return self.batch_invariance.pad(outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype)

    def _views(self, number: int, segments: Sequence[Segment]) -> list[tuple[_View, ...]]:
        """For each layer of a span, its views for every segment; made once per forward."""
        span, masks = self._spans[number], self._masks[number]
        # Torch's CPU kernel needs a mask; our own kernel and CUDA's flash kernel mask a prompt's rows themselves.
        masks_chunks = self.batch_invariance.attend_chunk is None and span.device.type != "cuda"
        if self.batch_invariance.attends_alone:
            segments = [part for segment in segments for part in segment.rows()]
        found, row = [], 0
        for segment in segments:
            start, stop = segment.start, segment.start + segment.num_rows
            keys, values = segment.cache.keys_by_span[number], segment.cache.values_by_span[number]
            hidden = segment.cache.hidden
            is_chunk = not masks_chunks and hidden is None and segment.num_rows > _MAX_STEP_ROWS
            is_unmasked = is_chunk or (start == 0 and stop > 1)
            context = stop if is_unmasked else masks.padded(stop)
            mask = None if is_unmasked else masks.rows(start, segment.num_rows)
            whole, skipped, closed = len(span.layers), 0, mask  # layers without hidden rows; the others' offset, mask
            if hidden is not None:
                whole, skipped, closed = hidden.within(span, mask, self.batch_invariance.context_block)
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
