"""Whoever is paused is the youngest, comes back first, and the budget is never overdrawn."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.inputs import Prompt
from vidspec_models.kv_cache import CacheGeometry, KVPool
from vidspec_models.token_sampling import CoupledSampler, SamplingLaw
from vidspec_service.engine.roster import Roster
from vidspec_service.engine.running import Running
from vidspec_service.engine.sequence import TargetSequence
from vidspec_service.engine.speculation import Speculation
from vidspec_service.engine.types import SpeculationMode

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)


def running(name: str, pool: KVPool, prompt_tokens: int, max_tokens: int = 40) -> Running:
    nothing = torch.zeros(0)
    prompt = Prompt(
        ids=(0,) * prompt_tokens, embeddings=nothing, rotary=(nothing, nothing), is_video=nothing,
        next_position=prompt_tokens,
    )  # fmt: skip
    return Running(
        request_id=name,
        prompt=prompt,
        cache=pool.new_cache(),
        sequence=TargetSequence(frozenset(), max_tokens),
        sampler=CoupledSampler(SamplingLaw()),
        speculation=Speculation(mode=SpeculationMode.OFF, acceptance=0.5),
    )


def prefill(roster: Roster, item: Running) -> bool:
    if not roster.secure(item, item.num_rows_to_resume - 1):
        return False
    item.cache.length = item.num_rows_to_resume - 1
    roster.begin_decoding(item)
    if not item.sequence.committed:
        item.sequence.commit([0])
    return True


def test_the_youngest_gives_way_and_returns_when_there_is_room() -> None:
    pool = KVPool(GEOMETRY, 16)
    roster = Roster(pool, max_running=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    for item in (old, young):
        roster.enter(item)
        assert prefill(roster, item)
    assert roster.secure(old, 8)
    assert list(roster.paused) == [young]
    assert young.cache.capacity == 0
    roster.finish("old")
    assert roster.next_prefill() is young


def test_a_request_that_needs_room_itself_may_be_the_one_that_waits() -> None:
    pool = KVPool(GEOMETRY, 8)
    roster = Roster(pool, max_running=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    roster.enter(old)
    assert prefill(roster, old)
    roster.enter(young)
    assert not prefill(roster, young)
    assert list(roster.paused) == [young]


def test_nobody_new_enters_while_somebody_is_paused() -> None:
    pool = KVPool(GEOMETRY, 8)
    roster = Roster(pool, max_running=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    roster.enter(old)
    prefill(roster, old)
    roster.enter(young)
    prefill(roster, young)
    assert roster.next_waiting() is None


@given(prompts=st.lists(st.integers(1, 12), min_size=1, max_size=6), budget=st.integers(40, 80))
def test_everyone_finishes_within_any_budget_that_fits_the_largest(prompts: list[int], budget: int) -> None:
    """A little scheduler: prefill one, decode one token each, until all are done; the oldest always advances."""
    pool = KVPool(GEOMETRY, budget)
    roster = Roster(pool, max_running=8, prefill_chunk=8)
    items = [running(str(i), pool, tokens, max_tokens=24) for i, tokens in enumerate(prompts)]
    for item in items:
        roster.enter(item)
    for _ in range(2000):
        candidate = roster.next_prefill()
        if candidate is not None:
            prefill(roster, candidate)
        for item in list(roster.decoding.values()):
            if item.request_id in roster.decoding and roster.secure(item, 1):
                item.cache.length += 1
                item.sequence.commit([0])
                if item.sequence.finish_reason is not None:
                    roster.finish(item.request_id)
        assert pool.num_used <= pool.num_tokens
        if not roster.num_active:
            break
    assert all(len(item.sequence.committed) == 24 for item in items)
    assert pool.num_used == 0
