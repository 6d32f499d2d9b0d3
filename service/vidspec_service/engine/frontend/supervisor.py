"""Worker: one worker process as its owner sees it: spawn, watch, bring back, give up.

States: starting → ready → (died or hung) → starting … → dead after too many failures in a row. Death is seen as the
closed channel, a hang as missing heartbeats; both end in a kill and a fresh process after a growing pause.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from functools import partial
from typing import Protocol

from vidspec_service.engine.frontend.client import WorkerClient
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Configure, LoadFailed, Message, Ready

_GRACE_S = 5.0
_SHORTEST_PAUSE_S = 0.1
_MOST_FAILURES = 5  # in a row, without having been ready in between for _STABLE_S or been excused
_STABLE_S = 5.0

logger = logging.getLogger(__name__)


class WorkerOwner(Protocol):
    """Who is told what becomes of a worker; all calls come from the event loop."""

    def worker_ready(self, worker: Worker, ready: Ready) -> None: ...
    def worker_said(self, worker: Worker, message: Message) -> None: ...
    def worker_lost(self, worker: Worker) -> bool: ...  # True if it was the work, not the worker
    def worker_dead(self, worker: Worker, reason: str) -> None: ...


class Worker(WorkerClient):
    """Never forked: each process is a fresh interpreter. All methods belong to one event loop."""

    def __init__(self, config: Configure, owner: WorkerOwner) -> None:
        super().__init__(config.role, config.engine.silence_s, partial(owner.worker_said, self))
        self._config = config
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._since = 0.0  # start of the present state
        self._restarting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Spawn a process; its Ready, or its failure, comes as a call to the owner."""
        ours, theirs = Channel.pair()
        command = [sys.executable, "-m", "vidspec_service.engine.worker_main", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._channel = ours
        self._enter(WorkerState.STARTING)
        ours.send(self._config)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)
        self._set_alarm(self._config.engine.start_timeout_s, "was not ready within")

    async def stop(self) -> None:
        """End the process: close its channel, which ends its loop; kill it if that takes too long."""
        self._enter(WorkerState.DEAD)
        if self._restarting is not None:
            self._restarting.cancel()
        self._disconnect()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process, _GRACE_S)

    def _enter(self, state: WorkerState) -> None:
        self.state, self._since = state, time.monotonic()

    def _loaded(self, message: Ready | LoadFailed) -> None:
        if isinstance(message, LoadFailed):
            self._give_up(message.message)
            return
        self._enter(WorkerState.READY)
        self._set_alarm(self._silence_s, "was silent for")
        self._owner.worker_ready(self, message)

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
            pause_s = _SHORTEST_PAUSE_S * 2**self._failures
            self._restarting = asyncio.get_running_loop().create_task(self._restart(pause_s))

    async def _restart(self, pause_s: float) -> None:
        process = self._process
        if process is not None:
            await asyncio.to_thread(_end, process, 0.0)
        await asyncio.sleep(pause_s)
        self.start()

    def _give_up(self, reason: str) -> None:
        self._disconnect()
        self._enter(WorkerState.DEAD)
        self._owner.worker_dead(self, reason)

    def _disconnect(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait a while, then kill; always reaps."""
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
