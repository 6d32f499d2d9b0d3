"""A worker's process: how it is started, watched and ended, whoever its supervisor is."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

import psutil

from vidspec_service.forking import ForkServer


class WorkerLauncher(ForkServer):
    """`launch` takes the worker's end of a channel; the worker sends `Started` once the libraries are imported."""

    def __init__(self) -> None:
        super().__init__("vidspec_service.engine.fork_server")


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
