"""When a worker is brought back, and when it is given up: by how long it served before it died."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine.counting_model import configure
from vidspec_service.engine.frontend import supervisor
from vidspec_service.engine.frontend.supervisor import Worker
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Message, Ready

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


class Process:
    """A worker's process without a model: it says that it is ready, and dies when it is told to."""

    pid = 1

    def __init__(self, command: list[str], **_: object) -> None:
        self.channel = Channel.from_fd(os.dup(int(command[-1])))

    def wait(self, timeout_s: float = 0) -> int:
        return 0

    def kill(self) -> None:
        """It is dead already."""


class Owner:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()

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
    processes: list[Process] = []

    def spawn(command: list[str], **options: Any) -> Process:
        processes.append(Process(command, **options))
        return processes[-1]

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("vidspec_service.engine.frontend.supervisor.subprocess.Popen", spawn)
    monkeypatch.setattr(supervisor, "_SHORTEST_PAUSE_S", 0.0)
    owner = Owner()
    worker = Worker(configure("draft"), owner)
    worker.start()
    async with asyncio.timeout(10):
        for _ in range(num_lives):
            processes[-1].channel.send(READY)
            assert await owner.told.get() == "ready"
            now += served_s
            processes[-1].channel.close()
            assert await owner.told.get() == "lost"
            before = len(processes)
            while len(processes) == before and owner.told.empty():  # noqa: ASYNC110  brought back or given up
                await asyncio.sleep(0.001)
    is_given_up = not owner.told.empty()
    assert is_given_up == (num_lives == 5)
    await worker.stop()
    processes[-1].channel.close()
