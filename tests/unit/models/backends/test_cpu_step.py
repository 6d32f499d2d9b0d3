"""The compiled step against transformers and against itself: equal logits; other rows in the batch change no bit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
import torch
from llvmlite import binding
from torch import Tensor

from tests.unit.models import random_models
from tests.unit.models.random_models import FAMILIES
from vidspec_models.backends.cpu import int8 as cpu_int8
from vidspec_models.backends.cpu import packing
from vidspec_models.backends.cpu.int8 import TOGETHER, int8_product, quantise_rows
from vidspec_models.backends.cpu.layers import rounded as rounded_rows
from vidspec_models.backends.cpu.layers import strip_product
from vidspec_models.backends.cpu.packing import (
    MAX_LINES,
    RECORD_BYTES,
    SMALL_RECORD_BYTES,
    STRIP,
    has_kernels_for,
    in_strips,
    int8_records,
    narrowed,
    packed,
    paired,
    small_records,
    step_weights,
)
from vidspec_models.backends.cpu.step import CpuStep
from vidspec_models.backends.cpu.tiles import MAX_ROWS
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Segment
from vidspec_models.decoder.int8 import (
    dequantise,
    fake_quantise,
    fake_quantise_rows,
    language_linears,
    layer_linears,
    quantise,
)
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.placement import has_avx512_bf16
from vidspec_models.decoder.quantised import Quantised, set_quantised
from vidspec_models.decoder.torch_runner import TorchRunner

pytestmark = pytest.mark.unit

CONTEXT = 512
build = partial(random_models.build, hidden_size=128, intermediate_size=192, max_position_embeddings=CONTEXT)
in_bfloat16 = pytest.mark.unit if has_avx512_bf16() else pytest.mark.slow  # emulation compiles extra kernels
FOUR_BITS = "int8 with weights of four bits"
DTYPES = [
    "float32",
    pytest.param("bfloat16", marks=in_bfloat16),
    "int8",
    pytest.param(FOUR_BITS, marks=pytest.mark.slow),  # its kernel is compiled in test_select.py, too
]


class Stepper:
    """A model that computes every row with the compiled step."""

    def __init__(self, model: Any, dtype: str = "float32") -> None:
        if dtype == "bfloat16":
            model.bfloat16()
        is_int8 = dtype in ("int8", FOUR_BITS)
        for linear in layer_linears(model.model) if dtype == FOUR_BITS else ():
            set_quantised(linear, random_four_bits(linear.out_features, linear.in_features, width=64, scale=0.02))
        if is_int8:
            fake_quantise([model.lm_head] if dtype == FOUR_BITS else language_linears(model.model, model.lm_head))
        with torch.inference_mode():
            self.decoder = build_decoder(model.model, model.lm_head, CONTEXT, batch_invariance=PREFILL_ONLY)
        self.step = CpuStep(model.model, model.lm_head, self.decoder, is_int8=is_int8)

    def cache(self) -> KVCache:
        return KVCache(self.decoder.geometry, CONTEXT)

    def run(self, *batch: tuple[KVCache, list[int]]) -> Tensor:
        segments = [Segment(cache, cache.length, len(ids)) for cache, ids in batch]
        positions = [segment.start + i for segment in segments for i in range(segment.num_rows)]
        logits = self.step([token for _, ids in batch for token in ids], positions, segments)
        for cache, ids in batch:
            cache.length += len(ids)
        return logits


def tokens(count: int, seed: int) -> list[int]:
    found: list[int] = torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pace", [1, 7, 30])
def test_logits_equal_the_reference(family: str, pace: int) -> None:
    model = build(family)
    stepper = Stepper(model)
    ids = tokens(90, 1)
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
    cache = stepper.cache()
    pieces = torch.cat([stepper.run((cache, ids[at : at + pace])) for at in range(0, 90, pace)])
    assert torch.allclose(pieces, reference, atol=5e-4)


@in_bfloat16
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_logits_are_as_near_the_reference_as_its_own_bfloat16(family: str) -> None:
    model = build(family).bfloat16()
    ids = tokens(90, 1)
    with torch.inference_mode():
        rounded = model(torch.tensor([ids])).logits[0].float()
        stepper = Stepper(model, "bfloat16")
        reference = model.float()(torch.tensor([ids])).logits[0]
    found = stepper.run((stepper.cache(), ids))
    assert (found - reference).abs().max() <= (rounded - reference).abs().max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 5e-4), pytest.param("bfloat16", 0.05, marks=in_bfloat16), ("int8", 0.05)]
)
def test_the_decoder_and_the_step_share_a_cache(dtype: str, tolerance: float) -> None:
    """In int8 the decoder and the reference use the rounded weights; only the rounding of rows differs."""
    model = build("qwen2")
    stepper = Stepper(model, dtype)
    ids = tokens(60, 2)
    cache = stepper.cache()
    decoder = stepper.decoder
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
        first = torch.tensor(ids[:40])
        TorchRunner(decoder).forward(*decoder.weights.rows(first, torch.arange(40)), [Segment(cache, 0, 40)])
    cache.length = 40
    assert torch.allclose(stepper.run((cache, ids[40:])), reference[40:].float(), atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_scored_together_have_the_bits_they_have_alone(family: str, dtype: str) -> None:
    stepper = Stepper(build(family), dtype)
    prompt, text = tokens(250, 3), tokens(2 * MAX_ROWS + 5, 4)
    cache = stepper.cache()
    stepper.run((cache, prompt))
    alone = torch.cat([stepper.run((cache, [token])) for token in text])
    for count in range(1, len(text) + 1):
        cache.truncate(250)
        assert torch.equal(stepper.run((cache, text[:count])), alone[:count]), f"{count} rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ragged_batch_gives_every_sequence_what_it_gets_alone(dtype: str) -> None:
    stepper = Stepper(build("qwen2"), dtype)
    prompts = [tokens(count, 5) for count in (5, 200, 61)]
    rows = [tokens(count, 6) for count in (4, 2, 9)]
    caches = [[stepper.cache() for _ in prompts] for _ in range(2)]
    for copies in caches:
        for cache, prompt in zip(copies, prompts, strict=True):
            stepper.run((cache, prompt))
    alone = torch.cat([stepper.run(pair) for pair in zip(caches[0], rows, strict=True)])
    assert torch.equal(stepper.run(*zip(caches[1], rows, strict=True)), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [31, 32, 33, 70])
def test_keys_that_were_written_anew_are_not_taken_from_before(dtype: str, length: int) -> None:
    """A cache keeps settled keys again as columns; the columns of truncated rows must be discarded, too."""
    stepper = Stepper(build("qwen2"), dtype)
    decoder, first, second = stepper.decoder, tokens(100, 7), tokens(100, 8)
    found, fresh = stepper.cache(), stepper.cache()
    stepper.run((found, first))
    stepper.run((found, first[:5]))  # settles all rows before these
    found.truncate(length)
    stepper.run((fresh, first[:length]))
    for cache in (found, fresh):
        with torch.inference_mode():
            rows = decoder.weights.rows(torch.tensor(second), torch.arange(length, length + 100))
            TorchRunner(decoder).forward(*rows, [Segment(cache, length, 100)])
        cache.length = length + 100
        assert cache.num_columns <= length
    assert torch.equal(stepper.run((found, [3])), stepper.run((fresh, [3])))
    found.resize(length + 120)
    assert torch.equal(stepper.run((found, [4])), stepper.run((fresh, [4])))


def test_a_product_in_int8_is_that_of_rounded_rows_and_weights() -> None:
    generator = torch.Generator().manual_seed(7)
    rows, weight = torch.randn(2 * MAX_ROWS + 1, 128, generator=generator), torch.randn(3 * STRIP, 128)
    rows[1], rows[2, :64], weight[5] = 0.0, 1e-30, 0.0
    out = np.ones((len(rows), 3 * STRIP), np.float32)
    strips = int8_records(weight, TOGETHER)
    int8_product(quantise_rows(rows.numpy(), strips), strips, out, 0, 3)
    rounded = dequantise(*quantise(weight))
    assert np.allclose(out, 1 + fake_quantise_rows(rows) @ rounded.T, atol=1e-4)
    assert not np.allclose(out, 1 + rows @ rounded.T, atol=1e-3)
    assert not np.allclose(out, 1 + fake_quantise_rows(rows) @ weight.T, atol=1e-3)


@pytest.mark.parametrize("num_rows", [1, 2, 5, MAX_ROWS + 3])
def test_a_quantised_weight_is_multiplied_by_its_own_integers(num_rows: int) -> None:
    """Neither form rounds them again, and four bits give the bits of the same integers in eight."""
    weight = random_four_bits(3 * STRIP - 8, 256)
    rows = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(7))
    products = []
    for strips in (int8_records(weight, TOGETHER), small_records(weight)):
        out = np.ones((num_rows, 3 * STRIP), np.float32)
        int8_product(quantise_rows(rows.numpy(), strips), strips, out, 0, 3)
        products.append(out[:, : 3 * STRIP - 8])
    assert np.allclose(products[0], 1 + fake_quantise_rows(rows) @ weight.weights(torch.float32).T, atol=1e-3)
    assert np.array_equal(products[0], products[-1])


def test_a_quantised_weight_takes_the_smallest_form_that_all_layers_fit() -> None:
    small, reordered = (
        random_four_bits(STRIP, 256),
        replace(random_four_bits(STRIP, 256), groups=torch.zeros(256).int()),
    )
    assert packed([[small], [small]], TOGETHER).shape[-1] == SMALL_RECORD_BYTES
    assert packed([[small], [reordered]], TOGETHER).shape[-1] == RECORD_BYTES
    rounded = int8_records(reordered.weights(torch.float32), TOGETHER)
    assert np.array_equal(packed([[small], [reordered]], TOGETHER)[1], rounded)


def random_four_bits(rows: int, columns: int, width: int = 128, scale: float = 1.0) -> Quantised:
    generator = torch.Generator().manual_seed(rows + columns)
    numbers = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(4, 13, (rows, columns // width), generator=generator)
    scales = scale * (torch.rand(rows, columns // width, generator=generator) + 0.5)
    return Quantised((rows, columns), numbers.__getitem__, scales.half(), zeros, width, bits=4)


@pytest.mark.parametrize(
    ("most_lanes", "feature", "instruction"),
    [
        (16, "avx512vnni", "vpdpbusd"),
        (16, "avx512bw", "avx512.pmaddw.d.512"),
        (8, "avxvnni", "{vex} vpdpbusd"),
        (8, "avx2", "avx2.pmadd.wd"),
        (0, "", ""),
    ],
)
def test_integers_are_multiplied_alike_whatever_the_instruction(
    most_lanes: int, feature: str, instruction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of rows are in one test, since its kernels are compiled for it."""
    if feature and not binding.get_host_cpu_features().get(feature):
        pytest.skip(f"this processor has no {feature}")
    together = 4 if feature.endswith("vnni") else 2
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(STRIP, 128, generator=generator)
    all_rows = [torch.randn(num_rows, 128, generator=generator).numpy() for num_rows in (1, 5, 12)]
    expected = [integer_product(rows, int8_records(weight, TOGETHER), int8_product, quantise_rows) for rows in all_rows]
    monkeypatch.setattr(cpu_int8, "TOGETHER", together)
    monkeypatch.setattr(cpu_int8, "_MAX_LANES", most_lanes)
    monkeypatch.setattr(cpu_int8, "SMALL_ROWS", 10 if most_lanes == 16 else 5)
    other_rows, other = numba.njit(quantise_rows.py_func), numba.njit(int8_product.py_func)
    of_small = numba.njit(int8_product.py_func)
    for rows, first in zip(all_rows, expected, strict=True):
        assert np.array_equal(first, integer_product(rows, int8_records(weight, together), other, other_rows))
        assert first.any()
        for small, given in ((random_four_bits(STRIP, 128), rows), *largest(len(rows))) if most_lanes else ():
            first = integer_product(given, int8_records(small, together), other, other_rows)
            second = integer_product(given, small_records(small), of_small, other_rows)
            assert np.array_equal(first, second)
            assert first.any()
    code = "".join(other.inspect_llvm().values())
    assert instruction in code if instruction else "pmadd" not in code and "vpdp" not in code


def largest(num_rows: int) -> Iterator[tuple[Quantised, Any]]:
    """The largest numbers of four bits with the largest rows: sums of half a block are 30,480 of 32,767."""
    for number, zero in ((15, 0), (0, 15)):
        numbers, zeros = torch.full((STRIP, 128), number, dtype=torch.uint8), torch.full((STRIP, 1), zero)
        weight = Quantised((STRIP, 128), numbers.__getitem__, torch.ones(STRIP, 1), zeros, 128, bits=4)
        for sign in (1, -1):
            yield weight, np.full((num_rows, 128), sign * 127, np.float32)


def integer_product(rows: Any, strips: Any, product: Any, convert: Any) -> Any:
    out = np.zeros((len(rows), STRIP), np.float32)
    product(convert(rows, strips), strips, out, 0, 1)
    return out


def test_weights_stored_as_bfloat16_give_the_bits_of_the_same_weights_in_float32() -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(3 * STRIP, 128, generator=generator).bfloat16().float()
    narrow, wide = narrowed(weight), in_strips(weight)
    assert narrow.nbytes * 2 == wide.nbytes
    rows = torch.randn(9, 128, generator=generator).numpy()
    first, second = (np.zeros((9, 3 * STRIP), np.float32) for _ in range(2))
    strip_product(rows, narrow, first, 0, len(narrow))
    strip_product(rows, wide, second, 0, len(wide))
    assert np.array_equal(first, second)
    assert np.allclose(first, rows @ weight.numpy().T, atol=1e-4)


@pytest.mark.parametrize(("dtype", "together"), [("float32", 0), ("bfloat16", 0), ("float32", 2), ("float32", 4)])
def test_weights_that_are_packed_some_columns_at_a_time_are_those_packed_at_once(
    dtype: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [[torch.randn(width, 128, generator=generator) for width in (96, 32, 70)] for _ in range(2)]
    layers = [[weight.to(getattr(torch, dtype)) for weight in layer] for layer in layers]
    at_once = packed([[torch.cat(layer)] for layer in layers], together)
    monkeypatch.setattr(packing, "_COLUMNS_AT_ONCE", STRIP)
    found = packed(layers, together)
    assert found.shape[:2] == (2, 7)
    assert found.dtype == at_once.dtype
    assert np.array_equal(found, at_once)


def test_one_number_that_bfloat16_cannot_hold_leaves_all_layers_in_float32() -> None:
    layers = [[torch.ones(64, 64)], [torch.ones(64, 64)]]
    assert packed(layers).dtype == np.uint32
    layers[1][0][50, 3] = 1 + 2**-20
    assert packed(layers).dtype == np.float32


@in_bfloat16
def test_a_product_in_bfloat16_is_that_of_the_rounded_numbers() -> None:
    generator = torch.Generator().manual_seed(7)
    rows, weight = torch.randn(9, 128, generator=generator), torch.randn(3 * STRIP, 128, generator=generator)
    out = np.zeros((9, 3 * STRIP), np.float32)
    strip_product(rounded_rows(rows.numpy()), paired(weight), out, 0, 3)
    assert np.allclose(out, rows.bfloat16().float() @ weight.bfloat16().float().T, atol=1e-4)


def test_a_checkpoint_in_bfloat16_is_held_at_half_the_size() -> None:
    model = build("llama")
    wide = weight_bytes(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert weight_bytes(model) * 2 == wide
    in_int8 = weight_bytes(model, integers_together=TOGETHER)
    assert in_int8 * 4 == pytest.approx(wide, rel=0.07)  # a quarter, plus one scale per 64 weights


def weight_bytes(model: Any, *, integers_together: int = 0) -> int:
    """Bytes of the weight matrices that a step reads."""
    weights = step_weights(model.model, model.lm_head, integers_together=integers_together)
    read = (weights.qkv, weights.output, weights.gate_up, weights.down, weights.head)
    return sum(array.nbytes for array in read)


def test_sizes_that_do_not_fill_vectors_are_left_to_the_decoder() -> None:
    assert has_kernels_for(build("llama").model)
    assert not has_kernels_for(build("llama", hidden_size=64).model)  # head size 16
    assert not has_kernels_for(build("llama", intermediate_size=200).model)
    assert not has_kernels_for(build("qwen3", hidden_size=112).model)
    assert not has_kernels_for(build("llama").half().model)
    assert has_kernels_for(build("llama").bfloat16().model) == has_avx512_bf16()


def test_more_heads_to_a_key_than_are_scored_together_are_left_to_the_decoder() -> None:
    assert has_kernels_for(build("qwen3", num_attention_heads=MAX_LINES, num_key_value_heads=1).model)
    assert not has_kernels_for(build("qwen3", num_attention_heads=MAX_LINES + 1, num_key_value_heads=1).model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_noisy", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_running_ahead_is_stepping_and_choosing_again_and_again(dtype: str, is_noisy: bool, num_threads: int) -> None:
    """Tokens, margins and cache equal those of single steps, after one row and after several."""
    stepper = Stepper(build("qwen2"), dtype)
    start, count, inverse_temperature = [3, 1, 4, 1, 5], 6, 0.5
    noise = torch.randn(count, 97, generator=torch.Generator().manual_seed(2)) * (1.0 if is_noisy else 0.0)
    alone = stepper.cache()
    tokens, margins, given = [], [], start
    for row in noise:
        best = (inverse_temperature * stepper.run((alone, given))[-1] + row).topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        given = tokens[-1:]
    cache = stepper.cache()
    stepper.step.use_threads(1, num_threads)
    found = stepper.step.run_ahead(start, 0, Segment(cache, 0, len(start)), noise, inverse_temperature, longest_s=60.0)
    assert found[0] == tokens
    assert found[1] == pytest.approx(margins, abs=1e-5)
    assert torch.equal(cache.keys[..., : alone.length, :], alone.keys[..., : alone.length, :])


def test_running_ahead_ends_in_time_after_the_token_at_hand() -> None:
    stepper, noise = Stepper(build("qwen2"), "float32"), torch.zeros(6, 97)
    step, whole, cache = stepper.step, stepper.cache(), stepper.cache()
    expected = step.run_ahead([3], 0, Segment(whole, 0, 1), noise, 1.0)
    tokens, margins = step.run_ahead([3], 0, Segment(cache, 0, 1), noise, 1.0, longest_s=0.0)
    assert (tokens, margins) == (expected[0][:1], expected[1][:1])
    rest = step.run_ahead(tokens, 1, Segment(cache, 1, 1), noise[1:], 1.0, longest_s=60.0)
    assert tokens + rest[0] == expected[0]
