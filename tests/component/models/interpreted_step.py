"""Run as a process with TRITON_INTERPRET=1: the CUDA step's kernels on the CPU against the plain step."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.unit.models.decoder.test_decoder import run
from tests.unit.models.random_models import build
from vidspec_models.backends.cuda.kernels import launch_options
from vidspec_models.backends.cuda.products import CudaProducts
from vidspec_models.backends.cuda.step import CudaStep
from vidspec_models.decoder.build import LayersAre, build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.int8 import fake_quantise, language_linears
from vidspec_models.decoder.int8_weight import int8_weight
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY

LENGTHS, COUNTS, AHEAD = (150, 40), (9, 2), 20  # beyond one tile; more rows than a forward of 8


def check(family: str) -> None:
    """Two requests of unequal lengths: the plain step's logits and caches, and the same bits when repeated."""
    model = build(family)
    decoder = build_decoder(model.model, model.lm_head, 1024, batch_invariance=PREFILL_ONLY)
    step = CudaStep(decoder, is_captured=False)
    generator = torch.Generator().manual_seed(5)
    plain, ours, again = (caches(decoder) for _ in range(3))
    for index, length in enumerate(LENGTHS):
        prompt = torch.randint(0, 97, (length,), generator=generator).tolist()
        for each in (plain, ours, again):
            run(decoder, each[index], prompt)
    ids = torch.randint(0, 97, (sum(COUNTS),), generator=generator).tolist()
    positions = [length + i for length, count in zip(LENGTHS, COUNTS, strict=True) for i in range(count)]
    wanted = decoder.step(ids, positions, segments(plain))
    found = step(ids, positions, segments(ours)).clone()
    assert torch.allclose(found, wanted, atol=2e-4), (found - wanted).abs().max()
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-4)
        assert torch.allclose(mine.values, theirs.values, atol=1e-4)
    alone = [step([ids[i]], [positions[i]], [Segment(again[0], positions[i], 1)])[0].clone() for i in range(2)]
    assert torch.allclose(torch.stack(alone), found[:2], atol=1e-5)
    check_tokens_in_one_go(decoder, step, torch.randint(0, 90, (AHEAD,), generator=generator).tolist())


def check_tokens_in_one_go(decoder: Decoder, step: CudaStep, ids: list[int]) -> None:
    """More rows than a block holds, then tokens chosen on the device: the same ids and cache rows as single steps."""
    one, other = KVCache(decoder.geometry, 180), KVCache(decoder.geometry, 180)
    noise = torch.randn(3, 90, generator=torch.Generator().manual_seed(6))  # 90 tokens; the other logits are padding
    chosen, margins, rows = list[int](), list[float](), ids
    for i in range(len(noise)):
        logits = step(rows, range(one.length, one.length + len(rows)), [Segment(one, one.length, len(rows))])
        one.length += len(rows)
        best = (2.0 * logits[-1, :90] + noise[i]).topk(2)
        chosen.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        rows = chosen[-1:]
    found = step.run_ahead(ids, 0, Segment(other, 0, len(ids)), noise, 2.0)
    assert found[0] == chosen
    assert torch.allclose(torch.tensor(found[1]), torch.tensor(margins), atol=1e-4)
    assert torch.allclose(one.keys, other.keys, atol=1e-5)


def check_weights_of_eight_bits() -> None:
    """They give the bits of the converted weights, in parts, whole and gated; so does a whole step of a model."""
    generator = torch.Generator().manual_seed(8)
    device = torch.device("cpu")
    products = CudaProducts(device, launch_options(device))
    linear, rows = nn.Linear(1024, 200, bias=False), torch.randn(16, 1024, generator=generator)
    linear.weight.copy_(torch.randn(200, 1024, generator=generator))
    small = int8_weight([linear], device)
    plain = small.converted(torch.float32)
    assert (plain - linear.weight).abs().max() < 0.03
    for compute in (products.parts, products.whole, products.gated):
        assert torch.equal(compute(rows, small), compute(rows, plain))
    model = build("qwen2", hidden_size=128, intermediate_size=192)
    small_step, step = (stepper(model, is_int8=is_int8) for is_int8 in (True, False))
    cache, other = (KVCache(each.geometry, 180) for each in (small_step[0], step[0]))
    found = small_step[1](range(5), range(5), [Segment(cache, 0, 5)])
    assert not torch.allclose(found, step[1](range(5), range(5), [Segment(other, 0, 5)]), atol=1e-3)
    fake_quantise(language_linears(model.model, model.lm_head))
    assert torch.equal(found, stepper(model, is_int8=False)[1](range(5), range(5), [Segment(other, 0, 5)]))


def stepper(model: Any, *, is_int8: bool) -> tuple[Decoder, CudaStep]:
    given = deepcopy(model)
    how: LayersAre = "rounded to int8" if is_int8 else "moved"
    decoder = build_decoder(given.model, given.lm_head, 1024, batch_invariance=PREFILL_ONLY, layers_are=how)
    return decoder, CudaStep(decoder, is_captured=False)


def check_products() -> None:
    """Products with a weight that is split into parts and whose columns do not fill the last program."""
    generator = torch.Generator().manual_seed(7)
    device = torch.device("cpu")
    products = CudaProducts(device, launch_options(device))
    rows, weight = torch.randn(16, 1024, generator=generator), torch.randn(200, 1024, generator=generator)
    hidden, norm = torch.randn(16, 200, generator=generator), torch.randn(200, generator=generator)
    parts = products.parts(rows, weight)
    assert len(parts) > 1
    assert torch.allclose(parts.sum(0), rows @ weight.t(), atol=1e-3)
    assert torch.allclose(products.whole(rows, weight), rows @ weight.t(), atol=1e-3)
    gate, up = (rows @ weight.t()).chunk(2, dim=-1)
    assert torch.allclose(products.gated(rows, weight), functional.silu(gate) * up, atol=1e-2)
    added = hidden + parts.sum(0)
    normed = products.add_and_norm(hidden, parts, norm, 1e-6)
    assert torch.allclose(hidden, added, atol=1e-4)
    assert torch.allclose(normed, functional.rms_norm(added, (200,), norm, 1e-6), atol=1e-4)


def caches(decoder: Decoder) -> list[KVCache]:
    return [KVCache(decoder.geometry, 180) for _ in LENGTHS]


def segments(of: list[KVCache]) -> list[Segment]:
    return [Segment(cache, cache.length, count) for cache, count in zip(of, COUNTS, strict=True)]


if __name__ == "__main__":
    with torch.inference_mode():
        check_products()
        check_weights_of_eight_bits()
        for name in sys.argv[1:]:
            check(name)
