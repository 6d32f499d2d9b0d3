"""Whoever is preempted is the youngest, comes back first, and the budget is never overdrawn."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.requests import target_request
from vidspec_models.decoder.kv_cache import CacheGeometry, KVPool
from vidspec_models.inputs import Prompt
from vidspec_service.engine.target.request import TargetRequest
from vidspec_service.engine.target.scheduler import Scheduler

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)


def running(name: str, pool: KVPool, prompt_tokens: int, max_tokens: int = 40) -> TargetRequest:
    nothing = torch.zeros(0)
    prompt = Prompt(
        ids=(0,) * prompt_tokens, embeddings=nothing, rotary=(nothing, nothing), is_video=nothing,
        next_position=prompt_tokens,
    )  # fmt: skip
    return target_request(prompt, pool.new_cache(), name=name, max_tokens=max_tokens)


def prefill(scheduler: Scheduler, item: TargetRequest) -> bool:
    if not scheduler.allocate(item, item.num_rows_to_resume - 1):
        return False
    item.cache.length = item.num_rows_to_resume - 1
    scheduler.begin_decoding(item)
    if not item.committed:
        item.commit([0])
    return True


def test_the_youngest_gives_way_and_returns_when_there_is_room() -> None:
    pool = KVPool(GEOMETRY, 16)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    for item in (old, young):
        scheduler.add(item)
        assert prefill(scheduler, item)
    assert scheduler.allocate(old, 8)
    assert list(scheduler.preempted) == [young]
    assert young.cache.capacity == 0
    scheduler.finish("old")
    assert scheduler.next_prefill() is young


def test_a_request_that_needs_room_itself_may_be_the_one_that_waits() -> None:
    pool = KVPool(GEOMETRY, 8)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    scheduler.add(old)
    assert prefill(scheduler, old)
    scheduler.add(young)
    assert not prefill(scheduler, young)
    assert list(scheduler.preempted) == [young]


def test_nobody_new_enters_while_somebody_is_preempted() -> None:
    pool = KVPool(GEOMETRY, 8)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    scheduler.add(old)
    prefill(scheduler, old)
    scheduler.add(young)
    prefill(scheduler, young)
    assert scheduler.begin_preparing() is None


@given(prompts=st.lists(st.integers(1, 12), min_size=1, max_size=6), budget=st.integers(40, 80))
def test_everyone_finishes_within_any_budget_that_fits_the_largest(prompts: list[int], budget: int) -> None:
    """A little scheduler: prefill one, decode one token each, until all are done; the oldest always advances."""
    pool = KVPool(GEOMETRY, budget)
    scheduler = Scheduler(pool, max_running_requests=8, prefill_chunk=8)
    items = [running(str(i), pool, tokens, max_tokens=24) for i, tokens in enumerate(prompts)]
    for item in items:
        scheduler.add(item)
    for _ in range(2000):
        candidate = scheduler.next_prefill()
        if candidate is not None:
            prefill(scheduler, candidate)
        for item in list(scheduler.decoding.values()):
            if item.request_id in scheduler.decoding and scheduler.allocate(item, 1):
                item.cache.length += 1
                item.commit([0])
                if item.finish_reason is not None:
                    scheduler.finish(item.request_id)
        assert pool.num_used <= pool.num_tokens
        if not scheduler.num_active:
            break
    assert all(len(item.committed) == 24 for item in items)
    assert pool.num_used == 0
