"""When a worker is brought back, and when it is given up: by how long it served before it died."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from tests.unit.engine.counting_model import configure
from vidspec_models.step_path import TORCH_OPERATORS
from vidspec_service.engine.frontend import supervisor
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.frontend.supervisor import Worker, WorkerLauncher
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Cancel, Generate, Heartbeat, KVBudget, Loaded, Message, Ready
from vidspec_service.engine.kv_budget import WorkerMemory

pytestmark = [pytest.mark.unit, pytest.mark.anyio]

READY = Ready(
    context_length=10,
    default_num_frames=8,
    device="cpu",
    dtype="float32",
    tokenizer_file="t",
    is_batch_invariant=True,
    versions={},
)


class Launcher:
    """Starts no process: keeps the channels of workers that a test speaks for."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.num_restarts = 0

    def launch(self, channel_fd: int) -> None:
        self.channels.append(Channel.from_fd(os.dup(channel_fd)))

    def restart(self) -> None:
        self.num_restarts += 1

    async def has_launched(self, count: int) -> None:
        while len(self.channels) < count:  # noqa: ASYNC110  there is no event for this
            await asyncio.sleep(0.001)


class Owner:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()

    def worker_loaded(self, worker: Worker, loaded: Loaded) -> None:
        self.told.put_nowait("loaded")
        worker.grant(loaded.memory.context)

    def worker_ready(self, worker: Worker, ready: Ready) -> None:
        self.told.put_nowait("ready")

    def worker_said(self, worker: Worker, message: Message) -> None:
        """Nothing is said here."""

    def worker_lost(self, worker: Worker) -> bool:
        self.told.put_nowait("lost")
        return False

    def worker_dead(self, worker: Worker, reason: str) -> None:
        self.told.put_nowait(reason)


@pytest.mark.parametrize(("served_s", "num_lives"), [(6.0, 12), (4.0, 5), (0.0, 5)])
async def test_only_deaths_soon_after_being_ready_count(
    monkeypatch: pytest.MonkeyPatch, served_s: float, num_lives: int
) -> None:
    now = 100.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)
    owner, launcher = Owner(), Launcher()
    worker = Worker(configure("draft"), cast(WorkerLauncher, launcher), owner)
    worker.start()
    async with asyncio.timeout(10):
        for _ in range(num_lives):
            launcher.channels[-1].send(READY)
            assert await owner.told.get() == "ready"
            now += served_s
            launcher.channels[-1].close()
            assert await owner.told.get() == "lost"
            before = len(launcher.channels)
            while len(launcher.channels) == before and owner.told.empty():  # noqa: ASYNC110  brought back or given up
                await asyncio.sleep(0.001)
    is_given_up = not owner.told.empty()
    assert is_given_up == (num_lives == 5)
    await worker.stop()
    launcher.channels[-1].close()


async def test_a_worker_that_does_not_read_for_a_while_loses_nothing() -> None:
    owner, launcher = Owner(), Launcher()
    worker = Worker(configure("target"), cast(WorkerLauncher, launcher), owner)
    worker.start()
    far = launcher.channels[0]
    async with asyncio.timeout(20):
        far.send(READY)
        assert await owner.told.get() == "ready"
        num_taken = 0
        while worker.send(Generate(request_id=str(num_taken))):
            num_taken += 1
        for number in range(500):
            worker.cancel(str(number))
        assert worker.state is WorkerState.READY
        found: list[Message] = []
        while len(found) < 3 and (received := far.receive()) is not None:
            found.append(received[0])
        assert not worker.send(Generate(request_id="late")), "it would overtake what was cancelled before it"
        while sum(isinstance(message, Cancel) for message in found) < 500:
            while (received := far.receive()) is not None:
                found.append(received[0])
            far.send(Heartbeat(cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=0.0, forwards=()))
            await asyncio.sleep(0)
    generated = [message.request_id for message in found if isinstance(message, Generate)]
    cancelled = [message.request_id for message in found if isinstance(message, Cancel)]
    assert (len(generated), cancelled) == (num_taken, [str(number) for number in range(500)])
    assert worker.send(Generate(request_id="late"))
    await worker.stop()
    far.close()


async def test_what_one_process_did_not_read_is_not_sent_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)
    owner, launcher = Owner(), Launcher()
    worker = Worker(configure("draft"), cast(WorkerLauncher, launcher), owner)
    worker.start()
    async with asyncio.timeout(20):
        launcher.channels[0].send(READY)
        assert await owner.told.get() == "ready"
        for number in range(1000):
            worker.cancel(str(number))
        launcher.channels[0].close()
        assert await owner.told.get() == "lost"
        await launcher.has_launched(2)
        launcher.channels[1].send(READY)
        assert await owner.told.get() == "ready"
    worker.cancel("new")
    heard = []
    while (received := launcher.channels[1].receive()) is not None:
        heard.append(received[0])
    assert [message for message in heard if isinstance(message, Cancel)] == [Cancel(request_id="new")]
    await worker.stop()
    launcher.channels[1].close()


async def test_a_process_that_ends_before_it_says_a_word_costs_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)
    owner, launcher = Owner(), Launcher()
    worker = Worker(configure("draft"), cast(WorkerLauncher, launcher), owner)
    worker.start()
    launcher.channels[0].close()
    async with asyncio.timeout(10):
        assert await owner.told.get() == "lost"
        await launcher.has_launched(2)
    assert launcher.num_restarts == 0  # all workers would end with what starts them
    await worker.stop()
    launcher.channels[1].close()


async def test_where_no_process_ever_came_what_starts_them_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)
    started = configure("draft")
    owner, launcher = Owner(), Launcher()
    impatient = structs.replace(started, engine=dataclasses.replace(started.engine, start_timeout_s=0.05))
    worker = Worker(impatient, cast(WorkerLauncher, launcher), owner)
    worker.start()
    async with asyncio.timeout(10):
        assert await owner.told.get() == "lost"
        await launcher.has_launched(2)
    assert launcher.num_restarts == 1
    await worker.stop()
    for channel in launcher.channels:
        channel.close()


@pytest.mark.parametrize(("cores", "num_silences"), [(0.0, 1), (0.05, 1), (1.0, 4)])
async def test_a_silent_worker_is_waited_for_while_it_computes_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cores: float, num_silences: int
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.02)
    monkeypatch.setattr(supervisor, "_MOST_SILENCES", 4)
    started = configure("target")
    owner, launcher = Owner(), Launcher()
    patient = structs.replace(started, engine=dataclasses.replace(started.engine, silence_s=0.1))
    worker = Worker(patient, cast(WorkerLauncher, launcher), owner)
    looks = itertools.count()
    monkeypatch.setattr(Worker, "_cpu_s", lambda _: next(looks) * 0.02 * cores)
    worker.start()
    async with asyncio.timeout(10):
        launcher.channels[0].send(READY)
        assert await owner.told.get() == "ready"
        assert await owner.told.get() == "lost"
    assert f"was silent for {0.1 * num_silences:g} s" in caplog.text
    assert caplog.text.count("computes; waiting for it") == num_silences - 1
    await worker.stop()
    for channel in launcher.channels:
        channel.close()


@pytest.mark.parametrize(("role", "told"), [("target", "lost"), ("draft", "ready")])
async def test_a_target_that_comes_back_computing_otherwise_does_not_go_on_with_texts(
    monkeypatch: pytest.MonkeyPatch, role: str, told: str
) -> None:
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)
    owner, launcher = Owner(), Launcher()
    worker = Worker(configure(role), cast(WorkerLauncher, launcher), owner)
    worker.start()
    async with asyncio.timeout(10):
        launcher.channels[0].send(READY)
        assert await owner.told.get() == "ready"
        launcher.channels[0].close()
        assert await owner.told.get() == "lost"
        await launcher.has_launched(2)
        launcher.channels[1].send(structs.replace(READY, step_path=TORCH_OPERATORS))
        assert await owner.told.get() == told
    await worker.stop()
    for channel in launcher.channels:
        channel.close()


async def test_a_worker_that_has_loaded_is_told_its_budget_before_it_is_ready() -> None:
    owner, launcher = Owner(), Launcher()
    worker = Worker(configure("draft"), cast(WorkerLauncher, launcher), owner)
    worker.start()
    far = launcher.channels[0]
    async with asyncio.timeout(10):
        far.send(Loaded(memory=WorkerMemory(context=77, measured_at=0.0, devices=())))
        assert await owner.told.get() == "loaded"
        said = [received[0] for _ in range(2) if (received := far.receive())]
        assert said[-1] == KVBudget(num_tokens=77)
        assert worker.state is WorkerState.STARTING
    await worker.stop()
    far.close()
