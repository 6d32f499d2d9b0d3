"""For `make test-all`: thousands of requests, some hostile, while the workers are killed in turns. None is lost."""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, collect, scene_video
from tests.component.engine.test_soak import resident_kib
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode
from vidspec_service.errors import ContextLengthExceeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

NUM_KINDS = 32
VIDEOS = [scene_video(number) for number in range(8)]


class Soak:
    """Requests of some kinds, whose texts are known from a calm time."""

    def __init__(self, harness: EngineHarness) -> None:
        self._harness = harness
        self._dice = random.Random(2)
        self._places = asyncio.Semaphore(16)
        self._calm = {kind: harness.answer(self._request(f"calm {kind}", kind)).ids for kind in range(NUM_KINDS)}

    def _request(self, name: str, kind: int) -> GenerationRequest:
        videos = [VIDEOS[kind % len(VIDEOS)]] if kind % 2 else []
        return ask(
            name,
            "Describe the video.",
            videos,
            sampling=SamplingParams(temperature=0.5, seed=kind),
            speculation=self._dice.choice(list(SpeculationMode)),
            max_tokens=10 + kind,
        )

    async def run(self, name: str, count: int, kill_every_s: float | None = None) -> None:
        """Ask `count` times, sixteen at a time."""
        killer = None if kill_every_s is None else asyncio.create_task(self._kill(kill_every_s))
        try:
            await asyncio.gather(*(self._one(f"{name} {number}") for number in range(count)))
        finally:
            if killer is not None:
                killer.cancel()

    async def _one(self, name: str) -> None:
        async with self._places:
            fate, kind = self._dice.random(), self._dice.randrange(NUM_KINDS)
            if fate < 0.1:
                with pytest.raises(ContextLengthExceeded):
                    await collect(self._harness.engine, ask(name, "\U0001f3a5" * 20_000, []))
                return
            answer = asyncio.create_task(collect(self._harness.engine, self._request(name, kind)))
            if fate < 0.3:  # it leaves
                await asyncio.wait([answer], timeout=self._dice.uniform(0.0, 1.0))
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
            else:
                assert (await answer).ids == self._calm[kind], (name, kind)

    async def _kill(self, every_s: float) -> None:
        while True:
            for role in ("target", "draft"):
                await asyncio.sleep(every_s)
                # While what a dead target had is tried, a death is blamed on whoever is on trial (test_poison).
                while any(state.num_lost_targets for state in self._harness.engine._table):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                if self._harness.engine.worker_pids()[role] is not None:
                    self._harness.kill(role)


@pytest.mark.parametrize(("count", "kill_every_s"), [(300, 8.0), (10_000, 60.0)])
def test_nothing_is_lost_and_no_text_changes_while_workers_die(count: int, kill_every_s: float) -> None:
    harness = EngineHarness(PAIR)
    try:
        soak = Soak(harness)
        harness.run(soak.run("warm", 100), timeout_s=900)
        memory, descriptors = resident_kib(os.getpid()), len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        harness.run(soak.run("killed", count, kill_every_s), timeout_s=4 * 3600)
        seconds = time.monotonic() - began
        harness.wait_until_ready()
        status = harness.engine.status()
        grown = resident_kib(os.getpid()) / memory
        print(f"{count} requests in {seconds:.0f} s, outages {status.outage_s:.1f} s, memory x {grown:.3f}")  # noqa: T201
        assert status.outage_s > 0
        assert (status.num_running, status.num_waiting) == (0, 0)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert grown < 1.03  # of the API; workers are others each time
    finally:
        harness.close()
