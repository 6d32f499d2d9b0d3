"""The youngest request is preempted and comes back first; the budget is never exceeded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.requests import request_of, target_request
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache, KVPool
from vidspec_models.preservation.text_queries import TextQueries
from vidspec_models.prompt import Prompt, PromptIdentity
from vidspec_service.engine.target.request import TargetRequest
from vidspec_service.engine.target.scheduler import Scheduler
from vidspec_service.engine.worker.input_processor import QueuedRequest

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)


def running(name: str, pool: KVPool, prompt_tokens: int, max_tokens: int = 40, caller: str = "") -> TargetRequest:
    nothing = torch.zeros(0)
    prompt = Prompt(
        ids=(0,) * prompt_tokens, embeddings=nothing, rotary=(nothing, nothing), is_video=nothing,
        next_position=prompt_tokens,
    )  # fmt: skip
    return target_request(prompt, pool.new_cache(), name=name, max_tokens=max_tokens, caller=caller)


def prefill(scheduler: Scheduler, item: TargetRequest) -> bool:
    if not scheduler.allocate(item, item.num_rows_to_resume - 1):
        return False
    item.cache.length = item.num_rows_to_resume - 1
    scheduler.begin_decoding(item)
    if not item.committed:
        item.commit([0])
    return True


def test_an_answer_that_ended_needs_no_room_for_another_token() -> None:
    """It fills the whole context, was complete when its target died, and gives way while its prompt comes again."""
    pool = KVPool(GEOMETRY, 16)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    old, ended = running("old", pool, 4), running("ended", pool, 8, max_tokens=8)
    ended.commit([1] * 8)
    for item in (old, ended):
        scheduler.add(item)
        assert scheduler.allocate(item, item.prompt.num_tokens)
    assert scheduler.allocate(old, 16)
    assert list(scheduler.preempted) == [ended]
    scheduler.cancel("old")
    assert scheduler.next_prefill() is ended


def test_the_youngest_gives_way_and_returns_when_there_is_room() -> None:
    pool = KVPool(GEOMETRY, 16)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    old, young = running("old", pool, 4), running("young", pool, 4)
    for item in (old, young):
        scheduler.add(item)
        assert prefill(scheduler, item)
    young.text_queries = TextQueries(young.prompt, GEOMETRY, 1.0)
    assert scheduler.allocate(old, 8)
    assert list(scheduler.preempted) == [young]
    assert young.cache.capacity == 0
    assert young.text_queries is None, "they would be noted twice"
    scheduler.finish("old")
    assert scheduler.next_prefill() is young


def test_of_two_that_gave_way_only_the_one_that_there_is_room_for_returns() -> None:
    pool = KVPool(GEOMETRY, 24)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    old, young, youngest = (running(name, pool, 4) for name in ("old", "young", "youngest"))
    for item in (old, young, youngest):
        scheduler.add(item)
        assert prefill(scheduler, item)
        item.commit([0] * 9)
    assert scheduler.allocate(old, 20)
    assert list(scheduler.preempted) == [young, youngest]
    scheduler.finish("old")
    assert scheduler.next_prefill() is young
    assert prefill(scheduler, young)
    assert scheduler.next_prefill() is None
    assert list(scheduler.preempted) == [youngest]


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


def test_no_more_prompts_are_prepared_than_the_cache_has_rows_for() -> None:
    """Sixteen prompts took their own memory while the cache, by which memory is counted, had room for two."""
    pool = KVPool(GEOMETRY, 24)
    scheduler = Scheduler(pool, max_running_requests=16, prefill_chunk=8)
    for number in range(4):
        scheduler.waiting.append(QueuedRequest(request_of(f"waits {number}")))
    for name, is_room_left in (("decodes", True), ("prefills", True), ("is to prefill", False)):
        assert scheduler.can_admit
        scheduler.add(running(name, pool, 11 if name == "decodes" else 12))
        assert scheduler.can_admit is is_room_left
    assert scheduler.begin_preparing() is None
    scheduler.cancel("decodes")
    scheduler.cancel("prefills")
    assert scheduler.begin_preparing() is not None


def test_what_is_kept_of_those_who_left_goes_before_anybody_who_is_here() -> None:
    pool = KVPool(GEOMETRY, 24)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    ended, old, young = (running(name, pool, tokens) for name, tokens in (("ended", 8), ("old", 4), ("young", 4)))
    ended.prompt = replace(ended.prompt, identity=PromptIdentity(video_keys=("v",), rows=-1 - np.arange(8)))
    for item in (ended, old, young):
        scheduler.add(item)
        assert prefill(scheduler, item)
        if item is ended:
            scheduler.finish("ended")
            assert pool.num_lent == 8
    assert scheduler.allocate(old, 8)
    assert pool.num_lent == 0
    assert not scheduler.preempted


def test_rows_are_lent_as_long_as_another_answer_to_the_same_prompt_is_to_come() -> None:
    pool = KVPool(GEOMETRY, 16)
    scheduler = Scheduler(pool, max_running_requests=4, prefill_chunk=8)
    first, second = running("first", pool, 4), running("second", pool, 4)
    for item in (first, second):
        item.asked, item.first_logits = replace(item.asked, parent_id="first"), torch.zeros(1)
        scheduler.add(item)
        assert prefill(scheduler, item)
    assert scheduler.allocate(first, 8)
    assert list(scheduler.preempted) == [second]
    scheduler.finish("first")
    assert scheduler.sibling(second) is first
    assert scheduler.next_prefill() is second
    assert prefill(scheduler, second)
    assert pool.num_used == second.cache.capacity
    scheduler.cancel("second")
    assert pool.num_used == 0


@given(prompts=st.lists(st.integers(1, 12), min_size=1, max_size=6), budget=st.integers(40, 80))
def test_everyone_finishes_within_any_budget_that_fits_the_largest(prompts: list[int], budget: int) -> None:
    """A simple loop: prefill one, decode one token each, until all are done; the oldest request always advances."""
    pool = KVPool(GEOMETRY, budget)
    scheduler = Scheduler(pool, max_running_requests=8, prefill_chunk=8)
    items = [running(str(i), pool, tokens, max_tokens=24) for i, tokens in enumerate(prompts)]
    for item in items:
        scheduler.add(item)
    for _ in range(2000):
        candidate = scheduler.next_prefill()
        if candidate is not None:
            prefill(scheduler, candidate)
        decode_one_each(scheduler)
        assert pool.num_used <= pool.num_tokens
        if not scheduler.num_active:
            break
    assert all(len(item.committed) == 24 for item in items)
    assert pool.num_used == 0


def decode_one_each(scheduler: Scheduler) -> None:
    for item in list(scheduler.decoding.values()):
        if item.request_id in scheduler.decoding and scheduler.allocate(item, 1):
            item.cache.length += 1
            item.commit([0])
            if item.finish_reason is not None:
                scheduler.finish(item.request_id)


CHUNK = 8


def chunks_in_order(scheduler: Scheduler, arrivals: dict[int, list[TargetRequest]]) -> list[str]:
    """The order in which requests' chunks are prefilled; `arrivals` maps a number of chunks to requests added then."""
    order: list[str] = []
    while True:
        for item in arrivals.get(len(order), ()):
            scheduler.add(item)
        item_or_none = scheduler.next_prefill()
        if item_or_none is None:
            return order
        item = item_or_none
        scheduler.restore(item)
        order.append(item.request_id)
        num_rows = min(CHUNK, item.prompt.num_tokens - item.cache.length)
        assert scheduler.allocate(item, num_rows)
        item.cache.length += num_rows
        if item.cache.length == item.prompt.num_tokens:
            scheduler.begin_decoding(item)


def test_anothers_only_prompt_waits_for_one_chunk_of_a_flood() -> None:
    pool = KVPool(GEOMETRY, 4096)
    scheduler = Scheduler(pool, max_running_requests=32, prefill_chunk=CHUNK)
    flood = [running(f"flood {number}", pool, 10 * CHUNK, caller="greedy") for number in range(16)]
    lone = running("lone", pool, 3 * CHUNK, caller="modest")
    order = chunks_in_order(scheduler, {0: flood, 5: [lone]})
    assert [place for place, name in enumerate(order) if name == "lone"] == [5, 7, 9]


def test_a_short_prompt_does_not_wait_behind_a_long_one_nor_the_long_one_for_ever() -> None:
    pool = KVPool(GEOMETRY, 16384)
    scheduler = Scheduler(pool, max_running_requests=256, prefill_chunk=CHUNK)
    long = running("long", pool, 20 * CHUNK)
    shorts = {number: [running(f"short {number}", pool, CHUNK)] for number in range(1, 120)}
    order = chunks_in_order(scheduler, {0: [long], **shorts})
    assert order[:5] == ["long", "short 1", "short 2", "short 3", "short 4"]
    ended = max(place for place, name in enumerate(order) if name == "long")
    assert ended < 110  # although short requests kept arriving
    assert len(order) == 139


def test_equal_prompts_are_prefilled_one_after_the_other() -> None:
    """Taking chunks in turns would make all of them wait for the last."""
    pool = KVPool(GEOMETRY, 4096)
    scheduler = Scheduler(pool, max_running_requests=32, prefill_chunk=CHUNK)
    order = chunks_in_order(scheduler, {0: [running(str(number), pool, 5 * CHUNK) for number in range(8)]})
    assert order == [str(number) for number in range(8) for _ in range(5)]


def of_video(item: TargetRequest, video: int = 0) -> TargetRequest:
    num_tokens = item.prompt.num_tokens
    identity = PromptIdentity(video_keys=(str(video),), rows=-1 - np.arange(num_tokens))
    item.prompt = replace(item.prompt, ids=tuple(range(100 * video, 100 * video + num_tokens)), identity=identity)
    return item


def test_a_prompt_begins_with_what_others_of_its_video_have_by_its_turn() -> None:
    pool = KVPool(GEOMETRY, 4096)
    scheduler = Scheduler(pool, max_running_requests=32, prefill_chunk=CHUNK)
    items = [of_video(running(str(number), pool, 5 * CHUNK + 1)) for number in range(3)]
    late = of_video(running("late", pool, 5 * CHUNK + 1))
    order = chunks_in_order(scheduler, {0: items, 3: [late]})
    assert order == ["0"] * 6 + ["late", "1", "2"]
    assert [item.num_cached for item in (*items, late)] == [0, *[5 * CHUNK] * 3]


@given(
    prompts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), min_size=1, max_size=8),
    budget=st.integers(40, 90),
    cancelled=st.sets(st.integers(0, 7), max_size=3),
)
def test_whatever_rows_are_copied_they_are_those_of_the_prompt(
    prompts: list[tuple[int, int]], budget: int, cancelled: set[int]
) -> None:
    """Two videos, a budget that makes requests give way, and some that leave in the middle of their prompt."""
    pool = KVPool(GEOMETRY, budget)
    scheduler = Scheduler(pool, max_running_requests=8, prefill_chunk=CHUNK)
    items = [of_video(running(str(i), pool, length, max_tokens=8), video) for i, (video, length) in enumerate(prompts)]
    for item in items:
        scheduler.add(item)
    for _ in range(2000):
        candidate = scheduler.next_prefill()
        if candidate is not None:
            compute_chunk(scheduler, candidate)
            if int(candidate.request_id) in cancelled:
                scheduler.cancel(candidate.request_id)
        decode_one_each(scheduler)
        assert pool.num_used <= pool.num_tokens
        if not scheduler.num_active:
            break
    assert all(len(item.committed) == 8 for item in items if int(item.request_id) not in cancelled)
    assert pool.usage == 0


def compute_chunk(scheduler: Scheduler, item: TargetRequest) -> None:
    """Compute the next rows of the prompt or, after a preemption, of its answer; rows hold their tokens."""
    scheduler.restore(item)
    wanted, start = torch.tensor(item.prompt.ids, dtype=torch.float32), item.cache.length
    num_rows = min(CHUNK, item.num_rows_left) or item.num_committed - 1
    if not scheduler.allocate(item, num_rows):
        return
    if item.num_rows_left:
        item.cache.keys[0, 0, 0, start : start + num_rows, 0] = wanted[start : start + num_rows]
    item.cache.length += num_rows
    assert torch.equal(item.cache.keys[0, 0, 0, : item.cache.length, 0][: len(wanted)], wanted[: item.cache.length])
    if item.cache.length == len(wanted) + max(item.num_committed - 1, 0):
        scheduler.begin_decoding(item)
        item.commit([] if item.committed else [0])


def test_a_copy_that_fails_leaves_no_room_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(GEOMETRY, 64)
    scheduler = Scheduler(pool, max_running_requests=8, prefill_chunk=CHUNK)
    first, second = (of_video(running(name, pool, 16)) for name in ("first", "second"))
    scheduler.add(first)
    assert prefill(scheduler, first)
    before = pool.num_used

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "copy_rows", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            scheduler.add(second)
    scheduler.cancel("second")
    assert pool.num_used == before


def test_a_prompt_that_gave_way_has_nothing_of_others_any_more() -> None:
    pool = KVPool(GEOMETRY, 64)
    scheduler = Scheduler(pool, max_running_requests=8, prefill_chunk=CHUNK)
    old, young = (of_video(running(name, pool, 16)) for name in ("old", "young"))
    scheduler.add(old)
    assert prefill(scheduler, old)
    scheduler.add(young)
    assert (young.num_cached, young.cache.length) == (8, 8)
    assert scheduler.allocate(old, 40)
    assert (list(scheduler.preempted), young.num_cached) == ([young], 0)
    scheduler.cancel("old")
    assert scheduler.next_prefill() is young
    scheduler.restore(young)
    assert (young.num_cached, young.cache.length) == (0, 0)


def test_what_was_preempted_goes_before_its_callers_other_prompts() -> None:
    pool = KVPool(GEOMETRY, 64)
    scheduler = Scheduler(pool, max_running_requests=8, prefill_chunk=CHUNK)
    old, young, small = (running(name, pool, tokens) for name, tokens in (("old", 16), ("young", 24), ("small", 4)))
    for item in (old, young):
        scheduler.add(item)
        assert prefill(scheduler, item)
    assert scheduler.allocate(old, 40)
    assert list(scheduler.preempted) == [young]
    scheduler.add(small)
    scheduler.finish("old")
    assert scheduler.next_prefill() is young


def test_the_next_to_prepare_is_of_the_caller_who_has_the_fewest_here() -> None:
    scheduler = Scheduler(KVPool(GEOMETRY, 4096), max_running_requests=32, prefill_chunk=CHUNK)
    for number in range(4):
        scheduler.waiting.append(QueuedRequest(request_of(f"flood {number}", caller="greedy")))
    first = scheduler.begin_preparing()
    scheduler.waiting.append(QueuedRequest(request_of("lone", caller="modest")))
    second = scheduler.begin_preparing()
    assert first is not None
    assert second is not None
    assert (first.request_id, second.request_id) == ("flood 0", "lone")
    assert scheduler.begin_preparing() is None  # at most two at a time
    assert scheduler.end_preparing("lone")
    assert not scheduler.end_preparing("lone")
