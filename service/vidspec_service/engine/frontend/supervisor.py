"""WorkerSupervisor: starts one worker process, watches it, restarts it, and gives it up after too many failures.

A forward may take longer than `silence_s` (a prompt of a large model on a CPU): a silent worker that uses the CPU all
the while gets many times as long.

States: starting → ready → (died or hung) → starting … → dead after too many failures in a row. A closed channel means
that the worker died, missing heartbeats that it hangs; both end in a kill and a new process after a growing pause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import psutil

from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, ChannelFull
from vidspec_service.engine.ipc.messages import (
    Cancel,
    Configure,
    Heartbeat,
    KVBudget,
    Loaded,
    LoadFailed,
    Message,
    Ready,
    Started,
)
from vidspec_service.forking import ForkServer

_GRACE_S = 5.0
_SHORTEST_PAUSE_S = 0.1
_RETRY_S = 1.0  # between two tries to start a worker when the API process lacks the means
_MAX_FAILURES = 5  # in a row; a worker that was ready for _STABLE_S, or a request to blame, starts a new count
_STABLE_S = 5.0
_MAX_SILENCES = 20  # times `silence_s`, for a worker that computes all the while
_LOOK_S = 1.0  # how long a silent worker's CPU time is watched
_AT_WORK = 0.1  # share of a core that a worker uses at least if it computes

logger = logging.getLogger(__name__)


class WorkerLauncher(ForkServer):
    """`launch` takes the worker's end of a channel; the worker sends `Started` once the libraries are imported."""

    def __init__(self, log_format: str) -> None:
        super().__init__("vidspec_service.engine.fork_server", log_format)


class WorkerProcess:
    """A running worker. It is not our child, so its pid could be reused; its pidfd never means another process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def cpu_s(self) -> float:
        """CPU seconds that the process has used; 0 if it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for the process to end, then kill it; blocks until it has ended."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(grace_s * 1000):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            ended.poll()
        os.close(self._pidfd)


class WorkerOwner(Protocol):
    """Gets a worker's messages and changes of state; all calls come from the event loop."""

    def on_worker_loaded(self, worker: WorkerSupervisor, loaded: Loaded) -> None: ...  # it waits for `grant`
    def on_worker_ready(self, worker: WorkerSupervisor, ready: Ready) -> None: ...
    def on_worker_message(self, worker: WorkerSupervisor, message: Message) -> None: ...
    def on_worker_lost(self, worker: WorkerSupervisor) -> bool: ...  # True if a request is to blame, not the worker
    def on_worker_dead(self, worker: WorkerSupervisor, reason: str) -> None: ...


class WorkerSupervisor:
    """The API's end of the channel to one worker, whichever process that is at present. Belongs to one event loop."""

    def __init__(self, config: Configure, launcher: WorkerLauncher, owner: WorkerOwner) -> None:
        self.role = config.role
        self.state = WorkerState.STARTING
        self._channel: Channel | None = None
        self._unsent: deque[Cancel] = deque()  # waiting until the worker reads
        self._alarm: asyncio.TimerHandle | None = None
        self._silence_s = config.engine.silence_s
        self._config = config
        self._owner = owner
        self._launcher = launcher
        self._process: WorkerProcess | None = None
        self._failures = 0
        self._since = 0.0  # start of the present state
        self._computes: str | None = None  # how its steps are computed, once it was ready
        self._restarting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start a process; the owner is called when it is ready or has failed."""
        self._channel, theirs = Channel.pair()
        self._launcher.launch(theirs.fileno())
        theirs.close()
        self._channel.send(self._config)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._read)
        limit_s = self._config.engine.start_timeout_s
        self._set_alarm(limit_s, partial(self._fail, f"was not ready within {limit_s:g} s", hangs=True))

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """Returns False if the worker cannot take the message now: it does not read, or it is lost (the owner is told).

        Pending cancellations are sent first.
        """
        self._send_cancels()
        return not self._unsent and self._send(message, fds)

    def _send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        if self._channel is None or self.state is not WorkerState.READY:
            return False
        try:
            self._channel.send(message, fds)
        except (ChannelFull, ChannelClosed):
            return False  # the alarm, or the reader callback, sees the same and handles it
        return True

    def cancel(self, request_id: str) -> None:
        """Cancel a request as soon as the worker reads; a restarted worker does not know the request."""
        if self.state is WorkerState.READY:
            self._unsent.append(Cancel(request_id=request_id))
            self._send_cancels()

    def _send_cancels(self) -> None:
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()

    def grant(self, num_tokens: int) -> None:
        """Tell a worker that has loaded how many tokens its KV cache may hold."""
        if self._channel is not None:
            with suppress(ChannelFull, ChannelClosed):  # the reader callback sees that the worker ended
                self._channel.send(KVBudget(num_tokens=num_tokens))

    async def stop(self) -> None:
        """End the process: close its channel, which ends its loop; kill it if that takes too long, or if it loads."""
        grace_s = _GRACE_S if self.state is WorkerState.READY else 0.0
        self._enter(WorkerState.DEAD)
        if self._restarting is not None:
            self._restarting.cancel()
        self._disconnect()
        if self._process is not None:
            await asyncio.to_thread(self._process.end, grace_s)

    def _enter(self, state: WorkerState) -> None:
        self.state, self._since = state, time.monotonic()

    def _read(self) -> None:
        try:
            while self._channel is not None and (received := self._channel.receive()) is not None:
                self._handle(*received)
        except ChannelClosed:
            self._fail("ended unexpectedly")

    def _handle(self, message: Message, fds: Sequence[int]) -> None:
        match message:
            case Started():
                self._process = WorkerProcess(message.pid, fds[0])
            case Loaded():
                self._owner.on_worker_loaded(self, message)
            case LoadFailed():
                self._give_up(message.message)
            case Ready() if self.role == "target" and self._computes not in (None, message.step_path.how):
                # Its sums round differently, so texts that the process before it began would go on differently.
                self._fail(f"computes its steps with {message.step_path.how}, the one before it with {self._computes}")
            case Ready():
                self._computes = message.step_path.how
                self._enter(WorkerState.READY)
                self._set_alarm(self._silence_s, self._fall_silent)
                self._owner.on_worker_ready(self, message)
            case _:
                if isinstance(message, Heartbeat):
                    self._set_alarm(self._silence_s, self._fall_silent)
                self._send_cancels()
                self._owner.on_worker_message(self, message)

    def _set_alarm(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`, unless another alarm is set before."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(seconds, action)

    def _fall_silent(self, times: int = 1) -> None:
        self._set_alarm(_LOOK_S, partial(self._judge_silence, times, self._cpu_s()))

    def _judge_silence(self, times: int, cpu_before_s: float) -> None:
        silent_s = times * self._silence_s
        if times < _MAX_SILENCES and self._cpu_s() - cpu_before_s > _AT_WORK * _LOOK_S:
            logger.warning("%s worker has been silent for %g s but uses the CPU; waiting for it", self.role, silent_s)
            self._set_alarm(self._silence_s, partial(self._fall_silent, times + 1))
        else:
            self._fail(f"was silent for {silent_s:g} s", hangs=True)

    def _cpu_s(self) -> float:
        return self._process.cpu_s() if self._process is not None else 0.0

    def _fail(self, what: str, *, hangs: bool = False) -> None:
        logger.error("%s worker %s", self.role, what)
        was_stable = self.state is WorkerState.READY and time.monotonic() - self._since > _STABLE_S
        self._disconnect()
        if hangs and self._process is None:  # the launcher hangs; restarting it ends the other workers, so only then
            with suppress(OSError):  # launching a worker starts it, too
                self._launcher.restart()
        self._enter(WorkerState.STARTING)
        is_excused = self._owner.on_worker_lost(self)
        self._failures = 0 if is_excused else 1 if was_stable else self._failures + 1
        if self._failures >= _MAX_FAILURES:
            logger.error("%s worker will not be restarted again", self.role)
            reason = "its log has the reason, or none if the kernel killed it for lack of memory (dmesg tells)"
            self._give_up(f"the {self.role} worker {what}, {self._failures} times in a row; {reason}")
        else:
            pause_s = _SHORTEST_PAUSE_S * 2**self._failures
            self._restarting = asyncio.get_running_loop().create_task(self._restart(pause_s))

    async def _restart(self, pause_s: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.end, 0.0)
        is_started = False
        while not is_started:
            await asyncio.sleep(pause_s)
            try:
                self.start()
                is_started = True
            except (OSError, ChannelClosed) as error:  # no descriptor, process or memory is left at the moment
                logger.error("%s worker cannot be started now: %s", self.role, error)
                self._disconnect()
                pause_s = _RETRY_S

    def _give_up(self, reason: str) -> None:
        self._disconnect()
        self._enter(WorkerState.DEAD)
        self._owner.on_worker_dead(self, reason)

    def _disconnect(self) -> None:
        self._unsent.clear()
        if self._alarm is not None:
            self._alarm.cancel()
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
