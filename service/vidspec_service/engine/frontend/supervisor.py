"""Worker: one worker process as its owner sees it: launch, watch, bring back, give up.

States: starting → ready → (died or hung) → starting … → dead after too many failures in a row. Death is seen as the
closed channel, a hang as missing heartbeats; both end in a kill and a fresh process after a growing pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Protocol

from vidspec_service.engine.frontend.launcher import WorkerLauncher, WorkerProcess
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, ChannelFull
from vidspec_service.engine.ipc.messages import Configure, LoadFailed, Message, Ready, Started
from vidspec_service.engine.types import WorkerState

_GRACE_S = 5.0
_SHORTEST_PAUSE_S = 0.1
_MOST_FAILURES = 5  # in a row, without having been ready in between for _STABLE_S or been excused
_STABLE_S = 5.0
_WATCH_S = 0.5

logger = logging.getLogger(__name__)


class WorkerOwner(Protocol):
    """Who is told what becomes of a worker; all calls come from the event loop."""

    def worker_ready(self, worker: Worker, ready: Ready) -> None: ...
    def worker_said(self, worker: Worker, message: Message) -> None: ...
    def worker_lost(self, worker: Worker) -> bool: ...  # True if it was the work, not the worker
    def worker_dead(self, worker: Worker, reason: str) -> None: ...


class Worker:
    """All methods belong to one event loop."""

    def __init__(self, config: Configure, launcher: WorkerLauncher, owner: WorkerOwner) -> None:
        self.role = config.role
        self.state = WorkerState.STARTING
        self._config = config
        self._owner = owner
        self._launcher = launcher
        self._process: WorkerProcess | None = None
        self._channel: Channel | None = None
        self._failures = 0
        self._since = 0.0  # start of the present state
        self._heard = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Have a process started; its Ready, or its failure, comes as a call to the owner."""
        self._channel, theirs = Channel.pair()
        self._process = None
        self._launcher.launch(theirs.fileno())
        theirs.close()
        self._enter(WorkerState.STARTING)
        self._channel.send(self._config)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._read)
        self._keep(self._watch(self._channel))

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """False if the worker cannot take it now; its owner will hear of its fate on its own."""
        if self._channel is None or self.state is not WorkerState.READY:
            return False
        try:
            self._channel.send(message, fds)
        except ChannelFull:
            self._fail("does not read its messages")
            return False
        except ChannelClosed:
            return False  # the reader callback sees the same and handles it
        return True

    async def stop(self) -> None:
        """End the process: close its channel, which ends its loop; kill it if that takes too long."""
        self._enter(WorkerState.DEAD)
        for task in self._tasks:
            task.cancel()
        self._disconnect()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, _GRACE_S)

    def _enter(self, state: WorkerState) -> None:
        self.state, self._since, self._heard = state, time.monotonic(), time.monotonic()

    def _read(self) -> None:
        try:
            while self._channel is not None and (received := self._channel.receive()) is not None:
                self._heard = time.monotonic()
                self._handle(*received)
        except ChannelClosed:
            self._fail("ended unexpectedly")

    def _handle(self, message: Message, fds: list[int]) -> None:
        match message:
            case Started():
                self._process = WorkerProcess(message.pid, fds[0])
            case Ready():
                self._enter(WorkerState.READY)
                self._owner.worker_ready(self, message)
            case LoadFailed():
                self._give_up(message.message)
            case _:
                self._owner.worker_said(self, message)

    async def _watch(self, channel: Channel) -> None:
        """Find a process that hangs: silent while ready, or loading for too long."""
        while channel is self._channel:
            await asyncio.sleep(_WATCH_S)
            is_ready = self.state is WorkerState.READY
            engine = self._config.engine
            heard, limit = (self._heard, engine.silence_s) if is_ready else (self._since, engine.start_timeout_s)
            if channel is self._channel and time.monotonic() - heard > limit:
                self._fail(f"was silent for {limit:g} s" if is_ready else f"was not ready within {limit:g} s")

    def _fail(self, what: str) -> None:
        if self.state is WorkerState.DEAD or self._channel is None:
            return
        logger.error("%s worker %s", self.role, what)
        was_stable = self.state is WorkerState.READY and time.monotonic() - self._since > _STABLE_S
        self._disconnect()
        self._enter(WorkerState.STARTING)
        is_excused = self._owner.worker_lost(self)
        self._failures = 0 if is_excused else 1 if was_stable else self._failures + 1
        if self._failures >= _MOST_FAILURES:
            logger.error("%s worker is given up", self.role)
            self._give_up(f"the {self.role} worker {what}, {self._failures} times in a row; its log says why")
        else:
            self._keep(self._restart(_SHORTEST_PAUSE_S * 2**self._failures))

    async def _restart(self, pause_s: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, 0.0)
        else:  # it was never there: what starts workers hangs
            self._launcher.restart()
        await asyncio.sleep(pause_s)
        self.start()

    def _give_up(self, reason: str) -> None:
        self._disconnect()
        self._enter(WorkerState.DEAD)
        self._owner.worker_dead(self, reason)

    def _disconnect(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
