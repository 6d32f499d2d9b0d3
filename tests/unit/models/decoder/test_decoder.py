"""The lean decoder against transformers' modules: equal logits, equal ids, and each row's bits stay the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.random_models import FAMILIES, build
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.torch_runner import TorchRunner


def decoder_of(model: Any) -> Decoder:
    with torch.inference_mode():
        return build_decoder(model.model, model.lm_head, 1024)


@torch.inference_mode()
def run(decoder: Decoder, cache: KVCache, ids: list[int]) -> Tensor:
    start = cache.length
    positions = torch.arange(start, start + len(ids))
    segment = Segment(cache, start, len(ids))
    hidden = TorchRunner(decoder).forward(*decoder.weights.rows(torch.tensor(ids), positions), [segment])
    cache.length += len(ids)
    return decoder.prompts.logits(hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference(family: str) -> None:
    model = build(family)
    decoder = decoder_of(model)
    ids = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0]
    whole = run(decoder, KVCache(decoder.geometry, 80), ids)
    assert torch.allclose(whole, reference, atol=2e-4)
    cache = KVCache(decoder.geometry, 80)
    pieces = torch.cat([run(decoder, cache, ids[at : at + 7]) for at in range(0, 70, 7)])
    assert torch.allclose(pieces, reference, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_scored_together_have_the_bits_they_have_alone(family: str) -> None:
    decoder = decoder_of(build(family))
    assert decoder.batch_invariance.holds
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 97, (250,), generator=generator).tolist()
    text = torch.randint(0, 97, (33,), generator=generator).tolist()
    cache = KVCache(decoder.geometry, 300)
    run(decoder, cache, prompt)
    alone = []
    for token in text:
        alone.append(run(decoder, cache, [token])[0])
    for count in (2, 3, 9, 16, 33):
        cache.truncate(250)
        together = run(decoder, cache, text[:count])
        for row in range(count):
            assert torch.equal(together[row], alone[row]), f"row {row} of {count}"


def test_rows_scored_together_have_these_bits_in_bfloat16_too() -> None:
    """There, attention over several rows differs so seldom that some rows measured at load may not show it."""
    decoder = decoder_of(build("qwen2", num_hidden_layers=6).to(torch.bfloat16))
    assert decoder.batch_invariance.holds
    text = torch.randint(0, 97, (101,), generator=torch.Generator().manual_seed(5)).tolist()
    cache = KVCache(decoder.geometry, 101)
    alone = [run(decoder, cache, [token])[0] for token in text]
    for count in (5, 10):
        cache.truncate(1)
        together = [run(decoder, cache, text[at : at + count]) for at in range(1, 101, count)]
        assert torch.equal(torch.cat(together), torch.stack(alone[1:]))


def test_a_ragged_batch_gives_every_sequence_what_it_gets_alone() -> None:
    decoder = decoder_of(build("qwen2"))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (5, 200, 61)]
    rows = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (4, 2, 9)]
    alone, batched = [], []
    for prompt, ids in zip(prompts, rows, strict=True):
        caches = [KVCache(decoder.geometry, 300) for _ in range(2)]
        for cache in caches:
            run(decoder, cache, prompt)
        alone.append(run(decoder, caches[0], ids))
        batched.append(caches[1])
    segments = [Segment(cache, cache.length, len(ids)) for cache, ids in zip(batched, rows, strict=True)]
    positions = torch.cat([torch.arange(s.start, s.start + s.num_rows) for s in segments])
    with torch.inference_mode():
        tokens = torch.tensor([token for ids in rows for token in ids])
        together = decoder.prompts.logits(
            TorchRunner(decoder).forward(*decoder.weights.rows(tokens, positions), segments)
        )
    assert torch.equal(together, torch.cat(alone))


def test_a_rolled_back_cache_is_as_good_as_new() -> None:
    decoder = decoder_of(build("qwen2"))
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    clean, used = KVCache(decoder.geometry, 64), KVCache(decoder.geometry, 64)
    run(decoder, clean, ids[:20])
    run(decoder, used, ids[:20])
    run(decoder, used, [1, 2, 3, 4, 5])
    used.truncate(20)
    assert torch.equal(run(decoder, clean, ids[20:30]), run(decoder, used, ids[20:30]))
