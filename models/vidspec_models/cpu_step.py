"""CpuStep: a model's decoding step on a CPU through compiled kernels, for Llama-shaped decoders.

A step of few rows reads every weight once, so its time is the weights' bytes. In float32 arithmetic they stay in the
narrowest type that holds them exactly: a checkpoint stored in bfloat16 is streamed as such and widened in registers,
which halves a step's time and changes no bit of its result. More rows are bound by arithmetic; a processor that
multiplies bfloat16 does so at twice the pace. Prefill's products, with hundreds of rows, stay with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidspec_models.cpu_kernels.ahead import run_ahead
from vidspec_models.cpu_kernels.attending import MAX_LINES, SEGMENT_FIELDS
from vidspec_models.cpu_kernels.kernels import StepWeights, decode
from vidspec_models.cpu_kernels.strips import STRIP
from vidspec_models.decoder import Decoder, Segment
from vidspec_models.decoder_weights import fused_weights, query_key_norm, query_key_value_bias
from vidspec_models.kv_cache import KVCache
from vidspec_models.processor import multiplies_bfloat16

_LOW_HALF = 0xFFFF
_Storing = Callable[[NDArray[np.float32]], NDArray[Any]]


class CpuStep:
    """Weights in kernel form; keeps no state between calls."""

    def __init__(self, language_model: Any, lm_head: Any, decoder: Decoder) -> None:
        self._decoder = decoder
        self._embedding = _array(decoder.embedding)
        self._tables = _array(decoder.rotary_tables)
        self._vocabulary = lm_head.weight.shape[0]
        eps = float(language_model.layers[0].input_layernorm.variance_epsilon)
        is_paired = decoder.embedding.dtype is torch.bfloat16
        self._query_type = np.uint16 if is_paired else np.float32
        self._weights = _step_weights(language_model, lm_head, decoder.head_dim, paired if is_paired else narrowed)
        self._constants = (decoder.num_heads, decoder.num_kv_heads, eps, decoder.scale, self._weights)
        # Compiles, or fetches what an earlier start did.
        self([0], [0], [Segment(KVCache(decoder.geometry, 1), 0, 1)])
        self.run_ahead([0], 0, Segment(KVCache(decoder.geometry, 1), 0, 1), torch.zeros(1, self._vocabulary), 1.0)

    @property
    def num_bytes(self) -> int:
        """Weights that a step reads."""
        weights = self._weights
        read = (weights.qkv, weights.output, weights.gate_up, weights.down, weights.head)
        return sum(array.nbytes for array in read)

    def __call__(self, ids: Sequence[int], positions: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """Logits [n, V] after `ids` at rotary `positions`, rows in the order of the segments.

        Writes every row's keys and values; advancing the caches' lengths is the caller's.
        """
        logits = decode(
            self._embedding[list(ids)],
            self._tables[list(positions)],
            _described(segments),
            *self._constants,
            self._scratch(),
        )
        return torch.from_numpy(logits)[:, : self._vocabulary]

    def run_ahead(
        self, ids: Sequence[int], position: int, segment: Segment, noise: Tensor, sharpness: float
    ) -> tuple[list[int], list[float]]:
        """As many tokens as `noise` float32 [count, V] has rows, each after the one before, the first after `ids`.

        A token has the largest of `sharpness` times its logit plus its noise; with it comes how far the second largest
        is behind. Writes keys and values of all but the last token.
        """
        count = len(noise)
        tokens, margins = np.empty(count, np.int64), np.empty(count, np.float32)
        run_ahead(
            self._embedding[list(ids)],
            position,
            self._embedding,
            self._tables,
            _described([segment]),
            *self._constants,
            self._scratch(),
            sharpness,
            noise.numpy(),
            tokens,
            margins,
        )
        return tokens.tolist(), margins.tolist()

    def _scratch(self) -> NDArray[Any]:
        return np.empty((MAX_LINES, self._decoder.head_dim), self._query_type)


def supports(language_model: Any) -> bool:
    """Whether the kernels compute this model: on a CPU, in sizes of whole vectors, in an arithmetic they have."""
    config, embedding = language_model.config, language_model.embed_tokens.weight
    head_dim = language_model.layers[0].self_attn.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    fits = all(size % STRIP == 0 for size in (head_dim, config.hidden_size, config.intermediate_size))
    is_known = embedding.dtype is torch.float32 or (embedding.dtype is torch.bfloat16 and multiplies_bfloat16())
    return fits and group <= MAX_LINES and embedding.device.type == "cpu" and is_known


def _described(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Segments as the kernels take them, [n, SEGMENT_FIELDS]."""
    table = np.empty((len(segments), SEGMENT_FIELDS), np.int64)
    row = 0
    for i, segment in enumerate(segments):
        cache, hidden = segment.cache, segment.cache.hidden
        table[i] = (
            row,
            segment.num_rows,
            segment.start,
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            cache.capacity,
            0 if hidden is None else hidden.count,
            0 if hidden is None else hidden.first_layer,
        )
        row += segment.num_rows
    return table


def _step_weights(language_model: Any, lm_head: Any, head_dim: int, stored: _Storing) -> StepWeights:
    layers = language_model.layers
    qkv, output, gate_up, down = (
        stored(_strips(weights)) for weights in zip(*(fused_weights(layer) for layer in layers), strict=True)
    )
    head_norms = [query_key_norm(layer.self_attn) for layer in layers]
    return StepWeights(
        attention_norm=_stacked([layer.input_layernorm.weight for layer in layers]),
        qkv=qkv,
        qkv_bias=_stacked([_bias(layer.self_attn, qkv) for layer in layers]),
        head_norm=_stacked([torch.empty(0, head_dim) if norm is None else norm for norm in head_norms]),
        output=output,
        mlp_norm=_stacked([layer.post_attention_layernorm.weight for layer in layers]),
        gate_up=gate_up,
        down=down,
        final_norm=_array(language_model.norm.weight),
        head=stored(_strips([lm_head.weight.detach()]))[0],
    )


def _strips(weights: Sequence[Tensor]) -> NDArray[np.float32]:
    """Linear weights [N, K] of every layer as [layers, N / 32, K, 32]."""
    stacked = np.stack([_array(weight) for weight in weights])
    num_layers, columns, inner = stacked.shape
    padded = np.zeros((num_layers, -(-columns // STRIP) * STRIP, inner), np.float32)
    padded[:, :columns] = stacked
    return np.ascontiguousarray(padded.reshape(num_layers, -1, STRIP, inner).transpose(0, 1, 3, 2))


def narrowed(strips: NDArray[np.float32]) -> NDArray[Any]:
    """Strips [..., 32] as `strip_tile` takes them: [..., 16] words of two bfloat16, unless that loses a bit."""
    bits = strips.view(np.uint32)
    if (bits & _LOW_HALF).any():
        return strips
    lower, upper = np.split(bits, 2, axis=-1)
    return np.asarray(lower >> 16 | upper)


def paired(strips: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Strips [..., K, 32] for bfloat16 arithmetic: [..., K / 2, 64], a column's two numbers side by side."""
    numbers = torch.from_numpy(strips).bfloat16().view(torch.uint16).numpy()
    rows = numbers.reshape(*strips.shape[:-2], -1, 2, STRIP).swapaxes(-1, -2)
    return np.ascontiguousarray(rows).reshape(*rows.shape[:-2], -1)


def _bias(attention: Any, qkv: NDArray[Any]) -> Tensor:
    bias = query_key_value_bias(attention)
    return torch.zeros(qkv.shape[1] * STRIP) if bias is None else bias


def _stacked(vectors: Sequence[Tensor]) -> NDArray[Any]:
    return np.stack([_array(vector) for vector in vectors])


def _array(tensor: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = tensor.detach().float().contiguous().numpy()
    return found
