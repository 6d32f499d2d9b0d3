"""A request that kills every target that runs it is refused; requests beside it lose only time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import LAUNCHER, EngineHarness, ask, collect, scene_video, unsure_video
from vidspec_models.request import SamplingParams
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend import supervisor
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.supervisor import WorkerLauncher, WorkerSupervisor
from vidspec_service.engine.frontend.workers import configure_messages
from vidspec_service.engine.ipc.messages import Loaded, Message, Ready
from vidspec_service.engine.types import PromptReady
from vidspec_service.errors import GenerationFailed
from vidspec_service.telemetry import Metrics

LAW = SamplingParams(temperature=0.5, seed=3)  # captions of about 70 tokens: long enough to be disturbed


class Deadly(LocalEngine):
    """Kills the target whenever it has accepted a request named poison."""

    def __init__(self, config: EngineConfig, metrics: Metrics, *, launcher: WorkerLauncher) -> None:
        super().__init__(config, metrics, launcher=launcher)
        self.blames: list[bool] = []

    def on_worker_message(self, worker: WorkerSupervisor, message: Message) -> None:
        if isinstance(message, PromptReady) and message.request_id.startswith("poison"):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        super().on_worker_message(worker, message)

    def on_worker_lost(self, worker: WorkerSupervisor) -> bool:
        self.blames.append(super().on_worker_lost(worker))
        return self.blames[-1]


@pytest.fixture(scope="module")
def deadly() -> Iterator[EngineHarness]:
    harness = EngineHarness(PAIR, Deadly)
    yield harness
    harness.close()


def blames(harness: EngineHarness) -> list[bool]:
    assert isinstance(harness.engine, Deadly)
    return harness.engine.blames


def test_what_kills_two_targets_is_refused_and_the_others_have_their_text(deadly: EngineHarness) -> None:
    requests = [ask(f"{i}", "Describe the video.", [scene_video(i, 2)], sampling=LAW, max_tokens=120) for i in range(3)]
    expected = [answer.ids for answer in deadly.answers(requests)]
    poison = ask("poison", "Describe the video.", [unsure_video(0)], max_tokens=500)
    started = len(blames(deadly))

    async def all_at_once() -> list[object]:
        mixed = [requests[0], poison, *requests[1:]]
        return await asyncio.gather(*(collect(deadly.engine, each) for each in mixed), return_exceptions=True)

    first, refusal, *others = deadly.run(all_at_once())
    assert isinstance(refusal, GenerationFailed)
    assert [getattr(answer, "ids", answer) for answer in (first, *others)] == expected
    assert blames(deadly)[started:] == [False, True]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_may_be_sent_again_and_again(deadly: EngineHarness) -> None:
    calm = ask("calm", "Describe the video.", [scene_video(0, 2)], sampling=LAW, max_tokens=120)
    expected = deadly.answer(calm).ids
    started = len(blames(deadly))
    for i in range(3):
        with pytest.raises(GenerationFailed):
            deadly.answer(ask(f"poison {i}", "Describe the video.", [unsure_video(i)], max_tokens=500))
    assert blames(deadly)[started:] == [False, True] * 3, "more in a row than a worker may fail"
    assert deadly.answer(replace(calm, request_id="after")).ids == expected


class Owner:
    """The owner of one worker; `excuses` says whether it excuses the worker's death."""

    def __init__(self, *, excuses: bool) -> None:
        self.excuses = excuses
        self.num_lost = 0
        self.reason: str | None = None

    def on_worker_loaded(self, worker: WorkerSupervisor, loaded: Loaded) -> None:
        raise AssertionError("on a CPU nobody asks")

    def on_worker_ready(self, worker: WorkerSupervisor, ready: Ready) -> None: ...

    def on_worker_message(self, worker: WorkerSupervisor, message: Message) -> None: ...

    def on_worker_lost(self, worker: WorkerSupervisor) -> bool:
        self.num_lost += 1
        return self.excuses

    def on_worker_dead(self, worker: WorkerSupervisor, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(("excuses", "num_lost"), [(True, 7), (False, 5)])
def test_a_worker_is_given_up_after_five_failures_that_nothing_excuses(
    monkeypatch: pytest.MonkeyPatch, excuses: bool, num_lost: int
) -> None:
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.001)
    LAUNCHER.start()
    owner = Owner(excuses=excuses)

    async def kill_as_it_comes() -> WorkerState:
        worker = WorkerSupervisor(configure_messages(PAIR)[0], LAUNCHER, owner)
        worker.start()
        killed: set[int | None] = set()
        async with asyncio.timeout(60):
            while owner.num_lost < 7 and worker.state is not WorkerState.DEAD:
                if (pid := worker.pid) is not None and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                await asyncio.sleep(0.01)
        state = worker.state
        await worker.stop()
        return state

    state = asyncio.run(kill_as_it_comes())
    assert owner.num_lost == num_lost
    assert state is (WorkerState.STARTING if excuses else WorkerState.DEAD)
    assert (owner.reason is None) is excuses
