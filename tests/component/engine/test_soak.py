"""Long runs for `make test-all`: kills of each worker, and five hundred requests, most of them cancelled early."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, collect, scene_video
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode
from vidspec_service.engine.types import TextDelta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STREAMS = 8
VIDEOS = [scene_video(i) for i in range(STREAMS)]


def requests(tag: str) -> list[GenerationRequest]:
    return [
        ask(f"{tag}-{i}", "Describe the video.", [VIDEOS[i]], sampling=SamplingParams(temperature=0.5, seed=i),
            max_tokens=100)
        for i in range(STREAMS)
    ]  # fmt: skip


def test_twenty_kills_of_each_worker_change_no_text() -> None:
    harness = EngineHarness(PAIR)
    dice = random.Random(0)
    try:
        expected = [answer.ids for answer in harness.answers(requests("calm"))]

        async def disturbed(role: str, turn: int) -> list[tuple[int, ...]]:
            streams = [asyncio.ensure_future(collect(harness.engine, request)) for request in requests(f"{role}{turn}")]
            await asyncio.sleep(dice.uniform(0.2, 2.0))
            harness.kill(role)
            return [answer.ids for answer in await asyncio.gather(*streams)]

        for turn in range(20):
            for role in ("draft", "target"):
                killed = harness.engine.worker_pids()[role]
                assert harness.run(disturbed(role, turn), timeout_s=180) == expected, (role, turn)
                harness.wait_until_replaced(role, killed)
            harness.run(asyncio.sleep(5.5))  # killed sooner, workers would count as never stable
    finally:
        harness.close()


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def test_five_hundred_requests_with_random_ends_leave_nothing_behind() -> None:
    harness = EngineHarness(PAIR)
    dice = random.Random(1)
    places = asyncio.Semaphore(16)

    async def one(i: int) -> None:
        async with places:
            request = ask(
                f"s{i}",
                "Describe the video.",
                [VIDEOS[i % STREAMS]],
                sampling=SamplingParams(temperature=1.0, seed=i),
                speculation=dice.choice(list(SpeculationMode)),
                max_tokens=dice.randint(1, 60),
            )
            task = asyncio.ensure_future(collect(harness.engine, request))
            if dice.random() < 0.5:
                await asyncio.wait([task], timeout=dice.uniform(0.0, 2.0))
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def many(first: int, count: int) -> None:
        await asyncio.gather(*(one(i) for i in range(first, first + count)))

    try:
        harness.run(many(0, 100), timeout_s=600)  # warm-up: arenas, caches, compiled shapes
        pids = {role: pid for role, pid in harness.engine.worker_pids().items() if pid is not None}
        before = {role: resident_kib(pid) for role, pid in pids.items()}
        descriptors = len(os.listdir("/proc/self/fd"))
        harness.run(many(100, 500), timeout_s=1500)
        harness.answer(ask("last", "Hello.", [], max_tokens=2))
        assert harness.engine.worker_pids() == pids, "a worker was restarted"
        status = harness.engine.status()
        assert (status.num_running, status.num_waiting) == (0, 0)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        for role, pid in pids.items():
            assert resident_kib(pid) < before[role] * 1.05, role
            assert len(os.listdir(f"/proc/{pid}/fd")) < 40
    finally:
        harness.close()


def test_a_killed_targets_streams_go_on_within_five_seconds() -> None:
    """The time from the kill until both streams have got another token."""
    harness = EngineHarness(PAIR)

    async def next_after_kill(turn: int) -> float:
        killed_at: float | None = None
        began = asyncio.Event()

        async def stream(index: int) -> float:
            request = requests(f"recovery{turn}")[index]
            async with aclosing(harness.engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TextDelta) and event.num_tokens:
                        if killed_at is not None:
                            return time.monotonic() - killed_at
                        began.set()
            raise AssertionError("it ended before the kill")

        streams = [asyncio.create_task(stream(index)) for index in range(2)]
        await began.wait()
        killed_at = time.monotonic()
        harness.kill("target")
        return max(await asyncio.gather(*streams))

    try:
        seconds = []
        for turn in range(3):
            seconds.append(harness.run(next_after_kill(turn)))
            harness.wait_until_ready()
            harness.run(asyncio.sleep(5.5))  # killed sooner, it would count as never stable
            outage_s = harness.engine.status().outage_s
        print(f"kill to next token: {', '.join(f'{each:.2f}' for each in seconds)} s; outages {outage_s:.2f} s")  # noqa: T201
        assert min(seconds) < 5  # the others may have been slowed by other work
        assert 0 < outage_s < sum(seconds)
    finally:
        harness.close()
