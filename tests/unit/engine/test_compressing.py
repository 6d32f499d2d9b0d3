"""Compression applies to requests that ask for it, with the server's parameters, and bounds what a forward verifies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.models.compression.prompts import video_prompt
from vidspec_models.compression.dycoke import REFRESH_TOKENS, DyCoke
from vidspec_models.inputs import PromptIdentity
from vidspec_models.kv_cache import CacheGeometry, KVCache
from vidspec_models.token_sampling import CoupledSampler, SamplingLaw
from vidspec_service.engine.compressing import TargetCompression
from vidspec_service.engine.messages import Generate
from vidspec_service.engine.policy import Plan
from vidspec_service.engine.running import Running
from vidspec_service.engine.sequence import TargetSequence
from vidspec_service.engine.speculation import Speculation
from vidspec_service.engine.types import SpeculationMode

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)
PLAIN = Generate(
    request_id="r", max_tokens=None, temperature=0.0, top_p=1.0, top_k=0, seed=0, speculation="auto", compression="none"
)
DYCOKE = replace(PLAIN, compression="dycoke")


def test_a_request_that_asks_for_nothing_keeps_its_prompt_and_all_of_its_keys() -> None:
    compression, prompt = TargetCompression(DyCoke(), 8), video_prompt(8, 2, 2)
    assert compression.prompt(PLAIN, prompt) is prompt
    assert compression.pruner(PLAIN, prompt) is None


def test_a_request_that_asks_for_it_gets_the_servers_ratios() -> None:
    compression, prompt = TargetCompression(DyCoke(merge_ratio=0.25, hide_ratio=0.5), 8), video_prompt(8, 2, 2)
    merged = compression.prompt(DYCOKE, prompt)
    assert merged.num_video_tokens == 2 * (4 + 3 * 3)
    pruner = compression.pruner(DYCOKE, merged)
    assert pruner is not None
    assert pruner.num_hidden == 13


def test_either_stage_can_be_off() -> None:
    prompt = video_prompt(8, 2, 2)
    hiding = TargetCompression(DyCoke(merge_ratio=0.0, hide_ratio=0.5), 8)
    assert hiding.prompt(DYCOKE, prompt).ids == prompt.ids
    assert hiding.pruner(DYCOKE, prompt) is not None
    merging = TargetCompression(DyCoke(merge_ratio=0.5, hide_ratio=0.0), 8)
    assert merging.prompt(DYCOKE, prompt).num_tokens < prompt.num_tokens
    assert merging.pruner(DYCOKE, prompt) is None


def test_a_compressed_requests_cache_serves_nobody_else() -> None:
    identity = PromptIdentity(video_keys=("v",), rows=np.arange(37))
    prompt = replace(video_prompt(8, 2, 2), identity=identity)
    for dycoke in (DyCoke(merge_ratio=0.0), DyCoke(), DyCoke(hide_ratio=0.0)):
        compression = TargetCompression(dycoke, 8)
        assert compression.prompt(DYCOKE, prompt).identity is None
        assert compression.prompt(PLAIN, prompt).identity is identity


def running(num_committed: int, *, is_compressed: bool) -> Running:
    """Decoding, with as many proposals as one may wish for."""
    prompt = video_prompt(8, 2, 2)
    pruner = TargetCompression(DyCoke(), 8).pruner(DYCOKE if is_compressed else PLAIN, prompt)
    sequence = TargetSequence(frozenset(), 200)
    sequence.commit([1] * num_committed)
    stored = KVCache(GEOMETRY, 400)
    stored.length = prompt.num_tokens + num_committed - 1
    speculation = Speculation(mode=SpeculationMode.PARALLEL, acceptance=0.9)
    speculation.plan = Plan(minimum=30, window=30, room=60, speedup=2.0)
    speculation.chain.extend(1, num_committed, (1,) * 40, (1.0,) * 40, sequence.committed)
    speculation.is_followed = True
    return Running(
        request_id="r",
        prompt=prompt,
        cache=stored,
        sequence=sequence,
        sampler=CoupledSampler(SamplingLaw()),
        speculation=speculation,
        pruner=pruner,
    )


@pytest.mark.parametrize("num_committed", range(1, 2 * REFRESH_TOKENS + 2))
def test_a_forward_ends_where_a_selection_ends_and_nobody_waits_for_more(num_committed: int) -> None:
    found = running(num_committed, is_compressed=True)
    first = num_committed - 1  # answer row that the forward begins with
    last = first + len(found.pending())
    assert first // REFRESH_TOKENS == last // REFRESH_TOKENS
    assert (last + 1) % REFRESH_TOKENS == 0
    assert found.has_enough
    assert found.rows(found.pending()).pruner is found.pruner


def test_without_compression_the_plan_alone_decides() -> None:
    assert len(running(5, is_compressed=False).pending()) == 30
