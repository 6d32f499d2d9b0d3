"""Layers on two GPUs: the bits of the plain step on one, no wait when crossing, and each GPU holds its share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu.models import SHAPES, no_waiting, segments
from vidspec_models.decoder.batch_invariant_ops import BatchInvariance
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache, LayerSpan
from vidspec_models.decoder.placement import layer_spans
from vidspec_models.decoder.torch_runner import TorchRunner
from vidspec_models.synthetic.model import random_language_model

SHAPE = replace(SHAPES["7b"], num_layers=4)
PROMPT, CHUNK, CONTEXT = 700, 512, 4096
CUDA = torch.device("cuda", 0)
# On one GPU nothing crosses between devices; everything else is as on two.
both = pytest.mark.parametrize("names", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")], ids=["one GPU", "two GPUs"])


@torch.inference_mode()
def decoder_on(names: tuple[str, ...], batch_invariance: BatchInvariance | None = None) -> Decoder:
    devices = [torch.device(name) for name in names]
    if max(device.index for device in devices) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    model = random_language_model(SHAPE, 0, CUDA, torch.bfloat16)
    spans = layer_spans(model, model.model, model.lm_head, devices)
    return build_decoder(
        model.model, model.lm_head, CONTEXT, batch_invariance=batch_invariance, layers_are="moved", spans=spans
    )


@torch.inference_mode()
def prefilled(decoder: Decoder, num_rows: int) -> tuple[KVCache, Tensor]:
    """A cache with a prompt in it, and the logits after it."""
    cache = KVCache(decoder.geometry, num_rows + 128)
    ids = torch.arange(num_rows, device=CUDA) * 13 % 500
    cos, sin = decoder.prompt_rotary(num_rows)
    for start in range(0, num_rows, CHUNK):
        part = slice(start, min(start + CHUNK, num_rows))
        segment = Segment(cache, start, part.stop - start)
        hidden = TorchRunner(decoder).forward(decoder.embedding[ids[part]], (cos[part], sin[part]), [segment])
        cache.length = part.stop
    return cache, decoder.prompts.logits(hidden[-1:])


@torch.inference_mode()
def step(decoder: Decoder, caches: list[KVCache], counts: tuple[int, ...]) -> Tensor:
    ids = [(7 * row + 1) % 500 for row in range(sum(counts))]
    positions = [cache.length + i for cache, count in zip(caches, counts, strict=True) for i in range(count)]
    return decoder.step(ids, positions, segments(caches, counts))


@both
def test_prompts_and_steps_have_the_bits_of_one_place(names: tuple[str, str]) -> None:
    whole = decoder_on(("cuda:0",))
    split = decoder_on(names, whole.batch_invariance)
    found: list[list[Tensor]] = []
    for decoder in (whole, split):
        caches, logits = zip(*(prefilled(decoder, PROMPT + 37 * i) for i in range(3)), strict=True)
        steps = [step(decoder, list(caches), counts) for counts in ((1, 1, 1), (1, 5, 9), (17, 1, 3))]
        assert {tensor.device for tensor in (*logits, *steps)} == {decoder.geometry.spans[-1].device}
        found.append([tensor.cpu() for tensor in (*logits, *steps)])
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(expected, ours)


@both
def test_the_rows_of_a_step_are_never_waited_for(names: tuple[str, str]) -> None:
    decoder = decoder_on(names)
    cache, _ = prefilled(decoder, PROMPT)
    hidden, rotary = decoder.embedding[:3], decoder.prompt_rotary(3)
    with no_waiting(), torch.inference_mode():
        logits = decoder.prompts.logits(TorchRunner(decoder).forward(hidden, rotary, [Segment(cache, PROMPT, 3)]))
    assert bool(logits.isfinite().all())


def test_the_second_gpu_holds_its_layers_and_their_rows() -> None:
    before = torch.cuda.memory_allocated(1) if torch.cuda.device_count() > 1 else 0
    decoder = decoder_on(("cuda:0", "cuda:1"))
    first, last = decoder.geometry.spans
    assert decoder.geometry.spans == (LayerSpan(CUDA, first.layers), LayerSpan(torch.device("cuda", 1), last.layers))
    held = torch.cuda.memory_allocated(1) - before
    head = SHAPE.vocabulary * SHAPE.hidden_size * 2
    layer = (SHAPE.parameters() * 2 - 2 * head) / SHAPE.num_layers
    assert held < 1.1 * (head + len(last.layers) * layer)
