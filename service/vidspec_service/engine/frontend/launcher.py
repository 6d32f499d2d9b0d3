"""WorkerLauncher: starts worker processes, forked from one that has their libraries imported; WorkerProcess: one."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import psutil


class WorkerLauncher:
    """Owns the fork server, which starts with the first worker and again if it has died. Its workers die with it.

    The kernel ends it when the thread that started it ends.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def launch(self, channel_fd: int) -> None:
        """Start a worker on its end of a channel; it says `Started` there, once the libraries are imported."""
        self.start()
        if self._requests is not None:
            with suppress(OSError):  # it is dying, or hangs; the channel's other end sees what became of it
                socket.send_fds(self._requests, [b"w"], [channel_fd])

    def start(self) -> None:
        """Start the fork server unless it runs; `launch` does this by itself."""
        if self._server is None or self._server.poll() is not None:
            self.restart()

    def restart(self) -> None:
        """Start the fork server, in the place of any earlier one."""
        self.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "vidspec_service.engine.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End the fork server, and with it every worker that still runs."""
        if self._requests is not None and self._server is not None:
            self._requests.close()
            self._server.kill()  # it keeps nothing; importing, it would not hear a milder word
            self._server.wait()
        self._requests = self._server = None


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
