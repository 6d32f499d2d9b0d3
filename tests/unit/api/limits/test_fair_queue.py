"""FairQueue: never more slots than exist, none lost; a caller with many requests does not delay one with few."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.api.limits.admission import FairQueue


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


class Served:
    """Acquires slots for callers and records who got one."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.order: list[str] = []

    def wants(self, caller: str, num: int = 1) -> asyncio.Task[None]:
        async def acquire() -> None:
            await self.queue.acquire(caller, num)
            self.order.append(caller)

        return asyncio.create_task(acquire())


def test_callers_are_served_in_rotation_whoever_came_first() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(1))
        tasks = [served.wants("greedy") for _ in range(5)]
        await settle()
        tasks += [served.wants("b"), served.wants("c"), served.wants("b")]
        await settle()
        for _ in range(7):
            served.queue.release(served.order[-1] if served.order else "first")
            await settle()
        await asyncio.gather(*tasks)
        return served.order

    assert asyncio.run(scenario()) == ["greedy", "greedy", "b", "c", "greedy", "b", "greedy", "greedy"]


def test_who_was_served_and_comes_again_is_behind_those_who_have_waited() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(1))
        await served.queue.acquire("first")
        tasks = [served.wants("a"), served.wants("b"), served.wants("b")]
        await settle()
        for caller in ("first", "a", "b", "a"):
            served.queue.release(caller)
            await settle()
            if caller == "first":
                tasks.append(served.wants("a"))
                await settle()
        await asyncio.gather(*tasks)
        return served.order

    assert asyncio.run(scenario()) == ["a", "b", "a", "b"]


def test_slots_that_come_free_together_all_go_to_the_only_one_who_waits() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(3))
        await served.queue.acquire("first", 3)
        tasks = [served.wants("a") for _ in range(3)]
        await settle()
        served.queue.release("first", 3)
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
        return served.order

    assert asyncio.run(scenario()) == ["a"] * 3


def test_a_slot_that_comes_while_its_request_is_cancelled_goes_to_the_next() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(1))
        await served.queue.acquire("first")
        leaving, next_one = served.wants("leaving"), served.wants("next")
        await settle()
        served.queue.release(served.order[-1] if served.order else "first")  # granted; the task has not run yet
        leaving.cancel()
        await asyncio.wait({leaving, next_one}, timeout=20)
        assert leaving.cancelled()
        return served.order

    assert asyncio.run(scenario()) == ["next"]


@pytest.mark.parametrize("holder", ["first", "several"])  # "several": beside those it has
def test_who_wants_several_slots_has_them_together_and_is_passed_by_nobody(holder: str) -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(3))
        await served.queue.acquire(holder, 2)
        tasks = [served.wants("several", 3), served.wants("one")]
        await settle()
        assert served.order == []  # though one slot is free
        served.queue.release(holder)
        await settle()
        assert served.order == []
        served.queue.release(holder)
        await settle()
        assert served.order == ["several"]
        served.queue.release("several", 3)
        await asyncio.gather(*tasks)
        return served.order

    assert asyncio.run(scenario()) == ["several", "one"]


def test_who_waits_behind_one_that_wanted_several_and_leaves_is_served() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(2))
        await served.queue.acquire("first")
        leaving, small = served.wants("leaving", 2), served.wants("small")
        await settle()
        leaving.cancel()
        await asyncio.wait({leaving, small}, timeout=20)
        return served.order

    assert asyncio.run(scenario()) == ["small"]


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_slot_is_lost_or_invented_whatever_comes_and_leaves(limit: int, seed: int) -> None:
    draw = random.Random(seed)

    async def scenario() -> None:
        queue = FairQueue(limit)
        served = Served(queue)
        tasks: set[asyncio.Task[None]] = set()
        num_out = 0
        for _ in range(60):
            match draw.randrange(4):
                case 0 | 1:
                    tasks.add(served.wants(draw.choice("abc")))
                case 2 if tasks:
                    draw.choice(sorted(tasks, key=id)).cancel()
                case 3 if len(served.order) > num_out:
                    queue.release(served.order[num_out])
                    num_out += 1
            if draw.random() < 0.7:
                await settle()
        await settle()
        assert len(served.order) - num_out <= limit
        assert all(task.done() for task in tasks) or len(served.order) - num_out == limit
        while len(served.order) > num_out or not all(task.done() for task in tasks):
            queue.release(served.order[num_out])
            num_out += 1
            await settle()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(limit):  # all slots are free again, and there are no more
            async with asyncio.timeout(20):
                await queue.acquire("last")
        extra = served.wants("extra")
        await settle()
        assert not extra.done()
        extra.cancel()
        await asyncio.gather(extra, return_exceptions=True)

    asyncio.run(scenario())


def test_nobody_takes_more_slots_than_one_may_have() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(3, most=2))
        tasks = [served.wants(caller) for caller in ("greedy", "greedy", "greedy", "other", "third")]
        await settle()
        begun = [*served.order]
        for caller in ("greedy", "greedy"):
            served.queue.release(caller)
        await asyncio.gather(*tasks)
        assert Counter(served.order) == {"greedy": 3, "other": 1, "third": 1}
        return begun

    assert sorted(asyncio.run(scenario())) == ["greedy", "greedy", "other"]


def test_nobody_takes_every_slot_where_there_are_several() -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(8, are_shared=True))
        tasks = [served.wants("greedy") for _ in range(20)]
        await settle()
        assert served.order == ["greedy"] * 6  # of 8
        tasks += [served.wants("modest")]
        await settle()
        assert served.order[6:] == ["modest"]  # at once
        for _ in range(6):
            served.queue.release("greedy")
            await settle()
        served.queue.release("modest")
        await settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return served.order

    assert asyncio.run(scenario()) == ["greedy"] * 6 + ["modest"] + ["greedy"] * 6


def test_whoever_gives_up_waiting_does_not_stand_in_the_way_of_the_next() -> None:
    async def scenario() -> None:
        queue = FairQueue(4, are_shared=True)
        for _ in range(3):
            await queue.acquire("greedy")
        waiting = asyncio.create_task(queue.acquire("greedy"))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        queue.release("greedy")
        async with asyncio.timeout(20):
            await queue.acquire("greedy")

    asyncio.run(scenario())


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_between_two_slots_of_one_caller_every_other_who_waits_has_one(wishes: list[str]) -> None:
    async def scenario() -> list[str]:
        served = Served(FairQueue(1))
        await served.queue.acquire("holder")
        tasks = [served.wants(caller) for caller in wishes]
        await settle()
        for _ in wishes:
            served.queue.release(served.order[-1] if served.order else "first")
            await settle()
        await asyncio.gather(*tasks)
        return served.order

    order = asyncio.run(scenario())
    left = Counter(wishes)
    rounds: list[set[str]] = [set()]
    for caller in order:
        if caller in rounds[-1]:
            assert rounds[-1] == {name for name in left if left[name] > 0} | rounds[-1]
            rounds.append(set())
        rounds[-1].add(caller)
        left[caller] -= 1
    assert Counter(order) == Counter(wishes)
