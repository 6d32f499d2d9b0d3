"""The process that decode children are forked from: confined, with PyAV imported, and never near a client's bytes.

Started as `python -m vidspec_service.decoding.isolation.fork_server FD PARENT_PID`. Starting an interpreter and
importing PyAV takes 0.13 s of a core, often more than a short clip; here that is paid once (ADR 22). What comes through
the socket FD are a child's channel and a socket for its life: there the pool is told the child's pidfd, and in the end
how it ended. The server ends when the pool closes the socket.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from vidspec_service.decoding.isolation import child
from vidspec_service.decoding.isolation.sandbox import Missing, dies_with, give_up_privileges

_NICENESS = 5  # as the workers': HTTP and health checks go first
_NUM_FDS = 2  # channel, life


def main(requests_fd: int, parent_pid: int) -> None:
    """Serve one pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides when children stop
    os.nice(_NICENESS)
    dies_with(parent_pid)
    missing = give_up_privileges()
    # The slow part of starting, which the children share; and no file can be opened once their filter is installed.
    from vidspec_service.decoding.reader import is_ffmpeg_fixed, sequence  # noqa: F401

    if not is_ffmpeg_fixed():
        missing |= Missing.FIXED_FFMPEG
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, pages that all children share
    with socket.socket(fileno=requests_fd) as requests:
        _serve(requests, missing)


@dataclass(frozen=True, slots=True)
class _Forked:
    pid: int
    life: socket.socket


def _serve(requests: socket.socket, missing: Missing) -> None:
    server, forked = os.getpid(), dict[int, _Forked]()  # by pidfd
    events = select.poll()
    events.register(requests, select.POLLIN)
    while True:
        for ready, _ in events.poll():
            if ready in forked:
                events.unregister(ready)
                _bury(forked.pop(ready))
                os.close(ready)
                continue
            fds = socket.recv_fds(requests, 1, _NUM_FDS)[1]
            if not fds:
                return
            channel, life = fds
            try:
                pid = os.fork()
            except OSError:
                pid = -1  # the pool sees every end closed
            if pid == 0:
                child.main(channel, missing, parent_pid=server)
            if pid > 0:
                pidfd = os.pidfd_open(pid)
                forked[pidfd] = _Forked(pid, socket.socket(fileno=os.dup(life)))
                events.register(pidfd, select.POLLIN)
                with suppress(OSError):  # the pool may want it no more: its channel is closed then, and it ends
                    socket.send_fds(forked[pidfd].life, [b"forked"], [pidfd])
            for fd in fds:
                os.close(fd)


def _bury(forked: _Forked) -> None:
    """Tell how a child has ended: the exit code, negative for the signal. Nothing of its group outlives it."""
    with suppress(ProcessLookupError):  # it had no time to make a group
        os.killpg(forked.pid, signal.SIGKILL)  # the pid is still its own
    code = os.waitstatus_to_exitcode(os.waitpid(forked.pid, 0)[1])
    with forked.life, suppress(OSError):  # nobody may ask any more
        forked.life.send(str(code).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
