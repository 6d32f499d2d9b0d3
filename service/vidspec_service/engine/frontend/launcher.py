"""WorkerLauncher: starts worker processes, forked from one that has their libraries imported; WorkerProcess: one."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

import psutil

from vidspec_service.forking import ForkServer


class WorkerLauncher(ForkServer):
    """`launch` takes a worker's end of a channel, where it says `Started` once the libraries are imported."""

    def __init__(self) -> None:
        super().__init__("vidspec_service.engine.fork_server")


class WorkerProcess:
    """A running worker, which is not our child: its pidfd cannot come to mean another process."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def cpu_s(self) -> float:
        """Processor's seconds that it has used; 0 if it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def end(self, grace_s: float) -> None:
        """Wait a while, then kill; blocks until it is gone."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(grace_s * 1000):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            ended.poll()
        os.close(self._pidfd)
