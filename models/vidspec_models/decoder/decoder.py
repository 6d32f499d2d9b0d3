"""The language model as one lean loop over fused weights: ragged batches of rows, each against its own cache.

transformers' modules stay the reference (tests compare logits and ids); this walk exists because a small model's
step is dominated by per-operation overhead, and because rows of many requests must share one matrix product.
It covers dense decoders of the Llama shape: RMSNorm, rotary grouped-query attention (with or without biases and
query/key norms), SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.batch_invariant_ops import BatchInvariance, CausalMasks, attend, attend_causally, rms_norm
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache
from vidspec_models.decoder.weights import DecoderWeights, LayerWeights
from vidspec_models.errors import ContextOverflow
from vidspec_models.step_path import TORCH_OPERATORS

_MOST_STEP_ROWS = 64  # beyond, rows are a prompt's: no mask needed, as nobody compares their bits
QueryObserver = Callable[[int, Tensor], None]  # layer index, its rotated queries [n, H, D]

# A layer's part in a forward of one segment: its rows; where their keys and values go [KV, n, D]; the keys and values
# that they attend to [1, KV, context, D]; their mask, None where they are plainly causal, as a prompt's rows are.
_View = tuple[slice, Tensor, Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a forward: cache rows start..start+num_rows are (over)written."""

    cache: KVCache
    start: int
    num_rows: int


# A prompt's rows [n, hidden size] through all layers: their rotary values, their segment, what is added after the first
# layers and who is shown the queries, as in `Decoder.forward`; and how many of the last rows are wanted: those back.
Prefill = Callable[[Tensor, tuple[Tensor, Tensor], Segment, Sequence[Tensor], QueryObserver | None, int], Tensor]


class Decoder:
    """Stateless apart from its weights; every call is under `torch.inference_mode` of the caller.

    Rows, their rotary values and additions come from the first layer's device, logits from the last one's; in between
    rows follow the layers.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        geometry: CacheGeometry,
        batch_invariance: BatchInvariance,
        num_heads: int,
        scale: float,
    ) -> None:
        """H query heads, whose products with keys are multiplied by `scale`. See `build_decoder`."""
        self.weights = weights
        self.geometry = geometry
        self.batch_invariance = batch_invariance
        self.step_path = TORCH_OPERATORS  # until something else computes steps in its place
        self.dtype_name = str(geometry.dtype).removeprefix("torch.")  # unless weights are in another
        self.cores = CoreShare()
        self.num_heads = num_heads
        self.scale = scale
        self.embedding = weights.embedding
        self.context_length = weights.rotary.shape[0]
        self._spans = geometry.spans
        block, group = batch_invariance.context_block, num_heads // geometry.num_kv_heads
        self._masks = [
            CausalMasks(
                self.context_length + block, block, group, geometry.dtype, span.device, batch_invariance.attention_lines
            )
            for span in self._spans
        ]
        self._attend_chunk = batch_invariance.attend_chunk or attend_causally
        self._eps = torch.full((1, 1, 1), weights.eps)
        self.prefill: Prefill = self._prefill  # unless something else computes prompts in its place

    def prompt_rotary(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of plain positions 0..num_tokens."""
        cos, sin = self.weights.rotary[:num_tokens].unbind(1)
        return cos, sin

    def require_room(self, num_tokens: int) -> None:
        """Raise ContextOverflow for a prompt that leaves no position to an answer."""
        if num_tokens >= self.context_length:
            raise ContextOverflow(
                f"the prompt has {num_tokens} tokens, the model's context is {self.context_length}; shorten it"
            )

    def step(self, ids: Sequence[int], positions: Sequence[int], segments: list[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at plain rotary `positions`, rows in the order of the segments."""
        ids_and_positions = torch.tensor((ids, positions), device=self.embedding.device)
        return self.logits(self.forward(*self.weights.rows(*ids_and_positions), segments))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [n, V] of final hidden rows [n, hidden size]."""
        num_rows, padded = hidden.shape[0], self.batch_invariance.pad(hidden)
        return self.weights.head(rms_norm(padded, self.weights.final_norm, self._eps))[:num_rows]

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
        advancing the caches' lengths is the caller's. `observer` is shown every layer's queries. Between GPUs the
        copies wait for nobody: they are ordered with the work on both sides by the devices themselves.
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
                if index < len(additions):
                    hidden[:num_rows] += additions[index].to(span.device)
        return hidden[:num_rows]

    def _prefill(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        segment: Segment,
        additions: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
        num_wanted: int = 1,
    ) -> Tensor:
        return self.forward(hidden, rotary, [segment], additions, observer)[len(hidden) - num_wanted :]

    def _heads(
        self, layer: LayerWeights, normed: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, H, D] and keys [n, KV, D], values [n, KV, D]; normed may have rows of padding."""
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
        """Write the segments' keys and values, attend; [n, H * D], padded."""
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
        """For each layer of a span, its part in every segment: made once a forward."""
        span, masks = self._spans[number], self._masks[number]
        # As torch's CPU kernel needs; a kernel of ours and CUDA's flash kernel mask a prompt's rows themselves.
        masks_chunks = self.batch_invariance.attend_chunk is None and span.device.type != "cuda"
        found, row = [], 0
        for segment in segments:
            start, stop = segment.start, segment.start + segment.num_rows
            keys, values = segment.cache.keys_by_span[number], segment.cache.values_by_span[number]
            hidden = segment.cache.hidden
            is_chunk = not masks_chunks and hidden is None and segment.num_rows > _MOST_STEP_ROWS
            is_unmasked = is_chunk or (start == 0 and stop > 1)
            context = stop if is_unmasked else masks.padded(stop)
            mask = None if is_unmasked else masks.rows(start, segment.num_rows)
            whole, skipped, closed = len(span.layers), 0, mask  # layers without hidden rows; what the others see
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
    """What each layer reads of a cache: all of its context, from layer `whole` on only what follows skipped rows."""
    return (*stored[:whole, :, :, :context].unbind(0), *stored[whole:, :, :, skipped:context].unbind(0))
