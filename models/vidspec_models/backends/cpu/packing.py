"""A model's weights in the kernels' layout, strips of columns; and which models have kernels. Needs no compiler.

In float32 arithmetic weights stay in the narrowest type that holds them exactly: a checkpoint stored in bfloat16 is
read as such and widened in registers, which halves a step's time and changes no bit of its result.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vidspec_models.core_share import torch_threads
from vidspec_models.decoder.int8 import BLOCK, integers_of
from vidspec_models.decoder.placement import attends_in_bfloat16, has_avx512_bf16
from vidspec_models.decoder.quantised import Quantised, quantised_weight
from vidspec_models.decoder.weights import linears_by_product, query_key_norm, query_key_value_bias

Array = NDArray[Any]
Weight = Tensor | Quantised  # [N, K]

LANES = 16  # per vector
STRIP = 2 * LANES  # columns per strip
MAX_LINES = 64  # most query heads, over all rows, that read keys together
BLOCK_BYTES = BLOCK * STRIP  # size of a strip's block of integers
EXCESS = 128  # added to weights for an instruction that takes them as unsigned
RECORD_BYTES = BLOCK_BYTES + STRIP * 4  # the integers and one float32 scale per column
SMALL_BITS = 4
SMALL_RECORD_BYTES = BLOCK_BYTES // 2 + STRIP + STRIP * 4  # two integers a byte; a zero and a scale per column

_LOW_HALF = 0xFFFF
_COLUMNS_AT_ONCE = 4 * STRIP  # packed at once: their numbers stay in a core's cache, but for the widest
_HUGE_PAGE = 2**21
# Weights per layer up to which many rows in float32 use our kernels. Time relative to torch: 4/5 with 2.2 million
# weights; with 14.9 million, where products take all of the time, 5/4 on AVX2 and 9/10 on AVX-512. More: not measured.
_FEW_WEIGHTS, _FEW_WEIGHTS_OF_AVX512 = 4_000_000, 15_000_000
_GELU, _TANH_GELU = "GELUActivation", "GELUTanh"  # transformers' classes


class StepWeights(NamedTuple):
    """A model of L layers for one step: H query heads, KV key/value heads of width D, hidden size E, MLP width M.

    Weights of products are in strips (see `in_strips`), with columns padded to whole strips. Shapes below are for
    float32. Alternatives: a strip's row of 16 words of two bfloat16 each; in bfloat16 arithmetic, two rows as one of 64
    (see `strip_tile`); in int8, records (see `int8_records`; of type uint8: `small_records`).
    """

    attention_norm: Array  # [L, E]
    qkv: Array  # [L, strips, E, 32]
    qkv_bias: Array  # [L, strips * 32]
    head_norm: Array  # [L, H + KV, D], or [L, 0, D] where heads are not normalised
    output: Array  # [L, strips, H * D, 32]
    mlp_norm: Array  # [L, E]
    gate_up: Array  # [L, strips, E, 32]
    down: Array  # [L, strips, M, 32]
    final_norm: Array  # [E]
    head: Array  # [strips, E, 32]
    num_heads: int
    num_kv_heads: int
    eps: float
    scale: float  # factor for products of queries and keys


def has_kernels_for(language_model: Any) -> bool:
    """Whether the kernels support this model on a CPU: with sizes of whole strips, in an arithmetic they have."""
    config, embedding = language_model.config, language_model.embed_tokens.weight
    head_dim = language_model.layers[0].self_attn.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    fits = all(size % STRIP == 0 for size in (head_dim, config.hidden_size, config.intermediate_size))
    is_known = embedding.dtype is torch.float32 or (embedding.dtype is torch.bfloat16 and has_avx512_bf16())
    return fits and group <= MAX_LINES and is_known


def is_faster_for_many_rows(num_weights: int) -> bool:
    """Whether a layer's products without int8 were measured to be faster with our kernels than with torch's."""
    few = _FEW_WEIGHTS_OF_AVX512 if torch.cpu._is_avx512_supported() else _FEW_WEIGHTS
    return attends_in_bfloat16() or num_weights <= few  # on Zen 4 in every arithmetic, up to the layers of a 7B


def fused_linears(module: Any, *, is_int8: bool) -> tuple[Any, ...]:
    """The linear layers of a vision module if there are kernels for the module, its sizes and arithmetic, and these are
    faster than torch; else none.
    """
    found: tuple[Any, ...] = ()
    if type(module) is SiglipEncoderLayer:
        attention, mlp = module.self_attn, module.mlp
        if type(mlp.activation_fn).__name__ == _TANH_GELU:
            found = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, mlp.fc1, mlp.fc2)
    elif type(module) is LlavaOnevisionMultiModalProjector and type(module.act).__name__ == _GELU:
        found = (module.linear_1, module.linear_2)
    if not found or found[0].in_features % (BLOCK if is_int8 else STRIP) or found[-1].out_features % STRIP:
        return ()  # sizes between are padded
    dtype = found[0].weight.dtype
    is_known = dtype is torch.float32 or (dtype is torch.bfloat16 and has_avx512_bf16())
    is_faster = is_known and is_faster_for_many_rows(sum(each.weight.numel() for each in found))
    return found if is_int8 or is_faster else ()


def step_weights(language_model: Any, lm_head: Any, *, integers_together: int) -> StepWeights:
    """All weights that a step reads, except the embedding. If `integers_together` is not 0, as `int8_records` with so
    many rows together, which have the numbers that `fake_quantise` rounds to.
    """
    config, layers = language_model.config, language_model.layers
    attention = layers[0].self_attn
    qkv, output, gate_up, down = (
        packed([[_stored(linear) for linear in part] for part in parts], integers_together)
        for parts in zip(*map(linears_by_product, layers), strict=True)
    )
    head_norms = [query_key_norm(layer.self_attn) for layer in layers]
    return StepWeights(
        attention_norm=_stacked([layer.input_layernorm.weight for layer in layers]),
        qkv=qkv,
        qkv_bias=_stacked([_bias(layer.self_attn, qkv) for layer in layers]),
        head_norm=_stacked([torch.empty(0, attention.head_dim) if norm is None else norm for norm in head_norms]),
        output=output,
        mlp_norm=_stacked([layer.post_attention_layernorm.weight for layer in layers]),
        gate_up=gate_up,
        down=down,
        final_norm=as_array(language_model.norm.weight),
        head=packed([[lm_head.weight.detach()]], integers_together)[0],
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        eps=float(layers[0].input_layernorm.variance_epsilon),
        scale=attention.scaling,
    )


def _stored(linear: nn.Linear) -> Weight:
    """A layer's weight in a quantised checkpoint's own form, or its numbers."""
    return quantised_weight(linear) or linear.weight.detach()


def packed(layers: Sequence[Sequence[Weight]], integers_together: int = 0) -> Array:
    """Every layer's linear weights [N, K] in strips, one behind the other, for the arithmetic of their dtype or as
    `int8_records`: [layers, strips, ...].

    Some columns at a time, since a large model's weights fit the memory hardly more than once, and each in one thread:
    operations on so few numbers end before torch has divided them. All but the last weight of a layer must have whole
    strips of columns.
    """
    form = _form([weight for layer in layers for weight in layer], integers_together)
    one = form(layers[0][0][:STRIP])
    num_strips = sum(-(-weight.shape[0] // STRIP) for weight in layers[0])
    found = in_huge_pages((len(layers), num_strips, *one.shape[1:]), one.dtype)

    def pack(index: int, first: int, part: Weight) -> None:
        strips = form(part)
        found[index, first : first + len(strips)] = strips

    num_threads = torch.get_num_threads()
    with torch_threads(1), ThreadPoolExecutor(num_threads, thread_name_prefix="packing") as threads:
        list(threads.map(pack, *zip(*_parts(layers), strict=True)))
    return found


def _parts(layers: Sequence[Sequence[Weight]]) -> Iterator[tuple[int, int, Weight]]:
    """Each layer's columns, some at a time: the layer's number, that of the first strip, and the weights."""
    for index, layer in enumerate(layers):
        strip = 0
        for weight in layer:
            for first in range(0, weight.shape[0], _COLUMNS_AT_ONCE):
                part = weight[first : first + _COLUMNS_AT_ONCE]
                yield index, strip, part
                strip += -(-part.shape[0] // STRIP)


def in_huge_pages(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An array in fresh pages of 2 MB, if it fills one: with small pages a step takes some percent longer.

    NumPy asks for such pages, too, but gets none where malloc gives it memory that was used before.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(memory, np.uint8)
    first = -numbers.ctypes.data % _HUGE_PAGE
    return numbers[first : first + size].view(dtype).reshape(shape)


def _form(weights: Sequence[Weight], integers_together: int) -> Callable[[Any], Array]:
    """How to store these weights."""
    if integers_together:
        are_small = torch.cpu._is_avx2_supported() and all(map(_is_small, weights))
        return small_records if are_small else partial(int8_records, num_together=integers_together)
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if plain[0].dtype is torch.bfloat16:
        return paired
    return narrowed if all(map(is_narrow, plain)) else in_strips


def is_narrow(weight: Tensor) -> bool:
    """Whether bfloat16 holds every number of a float32 tensor."""
    return not any((part.view(torch.int32) & _LOW_HALF).any() for part in weight.split(_COLUMNS_AT_ONCE))


def in_strips(weight: Tensor) -> Array:
    """A linear weight [N, K] as [N / 32, K, 32], with columns padded to whole strips."""
    return as_array(_whole_strips(weight).unflatten(0, (-1, STRIP)).transpose(1, 2))


def narrowed(weight: Tensor) -> Array:
    """A weight [N, K] that bfloat16 holds as [N / 32, K, 16] words of two bfloat16 for `strip_tile`."""
    lower, upper = np.split(in_strips(weight).view(np.uint32), 2, axis=-1)
    return np.asarray(lower >> 16 | upper)


def int8_records(weight: Weight, num_together: int) -> NDArray[np.int8]:
    """A weight [N, K] for integer products: [N / 32, K / 64, RECORD_BYTES].

    A record has a block's integers, with `num_together` successive rows side by side per column, then its 32 scales.
    """
    integers, scales = map(_whole_strips, integers_of(weight))
    if num_together == 4:
        integers ^= -EXCESS  # of eight bits: the same as adding it
    words = integers.view(torch.int32 if num_together == 4 else torch.int16)
    in_order = words.unflatten(0, (-1, STRIP)).unflatten(-1, (-1, BLOCK // num_together)).permute(0, 2, 3, 1)
    parts = (in_order, scales.unflatten(0, (-1, STRIP)).transpose(1, 2))
    return torch.cat([part.contiguous().view(torch.int8).flatten(2) for part in parts], dim=-1).numpy()


def _is_small(weight: Weight) -> bool:
    return isinstance(weight, Quantised) and weight.bits == SMALL_BITS and weight.has_integers(BLOCK)


def small_records(weight: Quantised) -> NDArray[np.uint8]:
    """A weight [N, K] of four bits for integer products: [N / 32, K / 64, SMALL_RECORD_BYTES].

    A record has a block's numbers in half of the bytes of `int8_records`: those of its last 32 rows in the upper bits.
    Then `EXCESS` less the zero of each column, which makes unsigned integers of eight bits of them. Then the scales.
    """
    numbers, zeros, scales = weight.by_block(BLOCK)
    words = _whole_strips(numbers).view(torch.int32).unflatten(0, (-1, STRIP)).unflatten(-1, (-1, BLOCK // 4))
    first, second = words.permute(0, 2, 3, 1).chunk(2, dim=2)
    added = _whole_strips(EXCESS - zeros).to(torch.uint8)
    columns = (part.unflatten(0, (-1, STRIP)).transpose(1, 2) for part in (added, _whole_strips(scales)))
    parts = (first | second << SMALL_BITS, *columns)
    return torch.cat([part.contiguous().view(torch.uint8).flatten(2) for part in parts], dim=-1).numpy()


def paired(weight: Tensor) -> Array:
    """A weight [N, K] for bfloat16 arithmetic: [N / 32, K / 2, 64], two numbers per column side by side."""
    pairs = _whole_strips(weight.bfloat16()).contiguous().view(torch.int32).unflatten(0, (-1, STRIP))
    found: Array = pairs.transpose(1, 2).contiguous().view(torch.uint16).numpy()
    return found


def _whole_strips(weight: Tensor) -> Tensor:
    """Rows [N, ...] padded with zeros to whole strips."""
    return nn.functional.pad(weight, (0, 0, 0, -len(weight) % STRIP))


def _bias(attention: Any, qkv: Array) -> Tensor:
    bias = query_key_value_bias(attention)
    return torch.zeros(qkv.shape[1] * STRIP) if bias is None else bias


def _stacked(vectors: Sequence[Tensor]) -> Array:
    return np.stack([as_array(vector) for vector in vectors])


def as_array(tensor: Tensor) -> Array:
    """A contiguous float32 array of the tensor."""
    found: Array = tensor.detach().float().contiguous().numpy()
    return found
