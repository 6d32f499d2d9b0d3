"""When a worker is restarted and when it is given up, by how long it served before it died."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from tests.fakes import MEMORY
from tests.unit.engine.counting_model import configure
from vidspec_models.step_path import TORCH_OPERATORS
from vidspec_service.engine.frontend import supervisor
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.frontend.supervisor import WorkerLauncher, WorkerProcess, WorkerSupervisor
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Cancel, Generate, Heartbeat, KVBudget, Loaded, Message, Ready, Started
from vidspec_service.engine.kv_budget import WorkerMemory

pytestmark = [pytest.mark.unit, pytest.mark.anyio]

READY = Ready(
    context_length=10,
    kv_cache_tokens=10,
    memory=MEMORY,
    default_num_frames=8,
    device="cpu",
    dtype="float32",
    tokenizer_file="t",
    is_batch_invariant=True,
    versions={},
)


class Launcher:
    """Starts no process: keeps the channels of the workers, whose part the test plays."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.num_restarts = 0
        self.can_start = True

    def launch(self, channel_fd: int) -> None:
        self.channels.append(Channel.from_fd(os.dup(channel_fd)))

    def restart(self) -> None:
        self.num_restarts += 1
        if not self.can_start:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async def has_launched(self, count: int) -> None:
        while len(self.channels) < count:  # noqa: ASYNC110  there is no event for this
            await asyncio.sleep(0.001)


class Owner:
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()

    def on_worker_loaded(self, worker: WorkerSupervisor, loaded: Loaded) -> None:
        self.told.put_nowait("loaded")
        worker.grant(loaded.memory.context)

    def on_worker_ready(self, worker: WorkerSupervisor, ready: Ready) -> None:
        self.told.put_nowait("ready")

    def on_worker_message(self, worker: WorkerSupervisor, message: Message) -> None:
        """Ignore the message."""

    def on_worker_lost(self, worker: WorkerSupervisor) -> bool:
        self.told.put_nowait("lost")
        return False

    def on_worker_dead(self, worker: WorkerSupervisor, reason: str) -> None:
        self.told.put_nowait(reason)


@dataclass
class Supervised:
    """A started worker; lets a test play its processes and see what the owner is told."""

    worker: WorkerSupervisor
    owner: Owner
    launcher: Launcher

    @property
    def far(self) -> Channel:
        """The channel end of the process that was started last."""
        return self.launcher.channels[-1]

    async def hears(self, told: str) -> None:
        assert await self.owner.told.get() == told

    async def gets_ready(self) -> None:
        self.far.send(READY)
        await self.hears("ready")

    async def dies(self) -> None:
        self.far.close()
        await self.hears("lost")

    def has_sent(self) -> list[Message]:
        """All messages to the process that were not read yet."""
        found = []
        while (received := self.far.receive()) is not None:
            found.append(received[0])
        return found


@asynccontextmanager
async def supervised(role: str = "draft", **engine: Any) -> AsyncIterator[Supervised]:
    owner, launcher = Owner(), Launcher()
    worker = WorkerSupervisor(configure(role, **engine), cast(WorkerLauncher, launcher), owner)
    worker.start()
    async with asyncio.timeout(20):
        yield Supervised(worker, owner, launcher)
    await worker.stop()
    for channel in launcher.channels:
        channel.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)


@pytest.mark.parametrize(
    ("lived_s", "gets_ready", "num_lives"), [(6.0, True, 12), (4.0, True, 5), (0.0, True, 5), (60.0, False, 5)]
)
async def test_only_deaths_before_being_ready_and_soon_after_count(
    monkeypatch: pytest.MonkeyPatch, lived_s: float, gets_ready: bool, num_lives: int
) -> None:
    now = 100.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    async with supervised() as world:
        for _ in range(num_lives):
            if gets_ready:
                await world.gets_ready()
            now += lived_s
            before = len(world.launcher.channels)
            await world.dies()
            while len(world.launcher.channels) == before and world.owner.told.empty():  # noqa: ASYNC110  back or given up
                await asyncio.sleep(0.001)
        told = [] if world.owner.told.empty() else [world.owner.told.get_nowait()]
    assert len(told) == (num_lives == 5)
    assert all("or none if the kernel killed it for lack of memory" in reason for reason in told)


async def test_a_worker_that_does_not_read_for_a_while_loses_nothing() -> None:
    async with supervised("target") as world:
        await world.gets_ready()
        num_taken = 0
        while world.worker.send(Generate(request_id=str(num_taken))):
            num_taken += 1
        for number in range(500):
            world.worker.cancel(str(number))
        assert world.worker.state is WorkerState.READY
        found: list[Message] = []
        while len(found) < 3 and (received := world.far.receive()) is not None:
            found.append(received[0])
        assert not world.worker.send(Generate(request_id="late")), "it would overtake what was cancelled before it"
        while sum(isinstance(message, Cancel) for message in found) < 500:
            found += world.has_sent()
            world.far.send(Heartbeat(cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=0.0, forwards=()))
            await asyncio.sleep(0)
        generated = [message.request_id for message in found if isinstance(message, Generate)]
        cancelled = [message.request_id for message in found if isinstance(message, Cancel)]
        assert (len(generated), cancelled) == (num_taken, [str(number) for number in range(500)])
        assert world.worker.send(Generate(request_id="late"))


async def test_what_one_process_did_not_read_is_not_sent_to_the_next() -> None:
    async with supervised() as world:
        await world.gets_ready()
        for number in range(1000):
            world.worker.cancel(str(number))
        await world.dies()
        await world.launcher.has_launched(2)
        await world.gets_ready()
        world.worker.cancel("new")
        heard = [message for message in world.has_sent() if isinstance(message, Cancel)]
        assert heard == [Cancel(request_id="new")]


async def test_a_worker_that_loads_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not see the end of its channel for as long as it compiles, and has nothing to save."""
    waits: list[float] = []

    def end(process: WorkerProcess, grace_s: float) -> None:
        waits.append(grace_s)
        os.close(process._pidfd)

    monkeypatch.setattr(WorkerProcess, "end", end)
    for is_ready in (False, True):
        async with supervised() as world:
            handle = os.pidfd_open(os.getpid())
            world.far.send(Started(pid=os.getpid()), [handle])
            os.close(handle)
            while world.worker.pid is None:  # noqa: ASYNC110  the supervisor has no event for this
                await asyncio.sleep(0.001)
            if is_ready:
                await world.gets_ready()
    assert waits == [0.0, supervisor._GRACE_S]


async def test_a_process_that_ends_before_it_says_a_word_costs_no_other_worker() -> None:
    async with supervised() as world:
        await world.dies()
        await world.launcher.has_launched(2)
        assert world.launcher.num_restarts == 0  # restarting the launcher would end all workers


async def test_a_worker_that_cannot_be_started_for_a_while_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else goes on meanwhile."""
    monkeypatch.setattr(supervisor, "_RETRY_S", 0.0)
    pairs, num_failures, num_turns, turns = Channel.pair, 0, 0, set[int]()

    async def all_else() -> None:
        nonlocal num_turns
        while len(turns) < 11:
            num_turns += 1
            await asyncio.sleep(0)

    def pair() -> tuple[Channel, Channel]:
        nonlocal num_failures
        num_failures += 1
        turns.add(num_turns)
        if num_failures <= 10:
            raise OSError(errno.EMFILE, "Too many open files")
        return pairs()

    async with supervised() as world:
        await world.gets_ready()
        monkeypatch.setattr(Channel, "pair", pair)
        going_on = asyncio.create_task(all_else())
        await world.dies()
        await world.launcher.has_launched(2)
        await world.gets_ready()
        await going_on


@pytest.mark.parametrize("can_start", [True, False], ids=["at once", "later"])
async def test_where_no_process_ever_came_what_starts_them_is_started_anew(can_start: bool) -> None:
    async with supervised(start_timeout_s=0.05) as world:
        world.launcher.can_start = can_start
        await world.hears("lost")
        await world.launcher.has_launched(2)
        assert world.launcher.num_restarts == 1


@pytest.mark.parametrize(("cores", "num_silences"), [(0.0, 1), (0.05, 1), (1.0, 4)])
async def test_a_silent_worker_is_waited_for_while_it_computes_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cores: float, num_silences: int
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.02)
    monkeypatch.setattr(supervisor, "_MAX_SILENCES", 4)
    looks = itertools.count()
    monkeypatch.setattr(WorkerSupervisor, "_cpu_s", lambda _: next(looks) * 0.02 * cores)
    async with supervised("target", silence_s=0.1) as world:
        await world.gets_ready()
        await world.hears("lost")
    assert f"was silent for {0.1 * num_silences:g} s" in caplog.text
    assert caplog.text.count("uses the CPU; waiting for it") == num_silences - 1


async def test_a_worker_that_gives_signs_of_life_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.01)
    loop, passed_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed_s)
    async with supervised(silence_s=4.0) as world:
        await world.gets_ready()
        for _ in range(4):
            passed_s += 3.0
            world.far.send(Heartbeat(cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=0.0, forwards=()))
            await asyncio.sleep(0.02)
        assert world.worker.state is WorkerState.READY


@pytest.mark.parametrize(("role", "told"), [("target", "lost"), ("draft", "ready")])
async def test_a_target_that_comes_back_computing_otherwise_does_not_go_on_with_texts(role: str, told: str) -> None:
    async with supervised(role) as world:
        await world.gets_ready()
        await world.dies()
        await world.launcher.has_launched(2)
        world.far.send(structs.replace(READY, step_path=TORCH_OPERATORS))
        await world.hears(told)


async def test_a_worker_that_has_loaded_is_told_its_budget_before_it_is_ready() -> None:
    async with supervised() as world:
        world.far.send(Loaded(memory=WorkerMemory(context=77, measured_at=0.0, devices=())))
        await world.hears("loaded")
        assert world.has_sent()[-1] == KVBudget(num_tokens=77)
        assert world.worker.state is WorkerState.STARTING
