"""Fork servers: processes that have imported what other processes need, and fork one of these for every request.

`ForkServer` is the owner's side; `tie_to_parent` and `serve_forks` run in the fork server itself.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vidspec_service.end_signals import END_SIGNALS

_PR_SET_PDEATHSIG = 1
_END_TIMEOUT_S = 5.0  # a killed server ends within milliseconds
_NICENESS = 5  # HTTP and health checks go first, also where models compute on the CPU
MOST_OOM_SCORE = 1000

_log = logging.getLogger(__name__)


class ForkServer:
    """A fork server, started with the first fork and again if it has died. The processes it forked die with it.

    The kernel kills the server when the thread that started it ends. Any thread may call.
    """

    def __init__(self, module: str, *arguments: str, is_bare: bool = False) -> None:
        """`module` is run with the descriptor through which requests come, our process id, and these arguments.

        A bare server gets nothing of ours: no environment but where libraries are, no working folder, no output.
        """
        self._module = module
        self._arguments = arguments
        self._is_bare = is_bare
        self._lock = threading.RLock()
        self._is_closed = False
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def launch(self, *fds: int) -> None:
        """Fork a process that gets the first of these descriptors; the other end of it shows whether the process lives.

        The second descriptor, if any, is a socket that stands for the process's life. Closing its other end, or
        shutting down the sending side of that end, kills the process. When the process has ended, its exit code can be
        read there, negative for a signal; nothing comes if it was not forked, or the server has died.

        Raises OSError if there is no server: none can be started, or it is closed.
        """
        with self._lock:
            self.start()
            try:
                self._send(fds)
            except ConnectionError:  # the server is dying, but not dead yet
                self.restart()
                self._send(fds)

    def _send(self, fds: tuple[int, ...]) -> None:
        assert self._requests is not None
        with suppress(BlockingIOError):  # the server hangs
            socket.send_fds(self._requests, [b"f"], fds)

    def start(self) -> None:
        """Start the server unless it runs; `launch` does this by itself, and raises the same errors."""
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("the fork server is closed")
            if self._server is not None and self._server.poll() is None:
                return
            self._end()
            environment = dict(os.environ)  # noqa: TID251  handed on as it is
            if self._is_bare:  # no keys to steal; some builds of Python find their own library by nothing else
                libraries = {"LD_LIBRARY_PATH": environment.get("LD_LIBRARY_PATH", "")}
                environment = libraries | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._requests.setblocking(False)
            with theirs:
                arguments = str(theirs.fileno()), str(os.getpid()), *self._arguments
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if self._is_bare else None,
                    stderr=subprocess.DEVNULL if self._is_bare else None,
                    # Forking is safe with one thread. numpy's OpenBLAS starts one a core when it is imported.
                    env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                    cwd="/" if self._is_bare else None,
                )

    def restart(self) -> None:
        """Start a new server in the place of any earlier one, unless it is closed."""
        with self._lock:
            if not self._is_closed:  # a caller may notice only after `close` that the server hangs
                self._end()
                self.start()

    def close(self) -> None:
        """End the server for good, and with it every process that it has forked."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._server is not None:
            self._server.kill()  # it has nothing to save; while it imports, it would not see the closed socket
            with suppress(subprocess.TimeoutExpired):  # the kernel may hold it, as while a disk does not answer
                self._server.wait(_END_TIMEOUT_S)
            self._server = None


@dataclass(frozen=True, slots=True)
class _Forked:
    pid: int
    pidfd: int
    control_fds: list[int]  # one descriptor, or none


def serve_forks(requests_fd: int, child_main: Callable[[int], NoReturn]) -> None:
    """For every request, fork a process that calls `child_main` with its channel, until the owner closes the socket.

    Forking is safe while there is only one thread.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it stayed ignored, as inherited, no child could be waited for
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, pages that all children share
    server, forked = os.getpid(), dict[int, _Forked]()  # by each of a process's descriptors
    with socket.socket(fileno=requests_fd) as requests, select.epoll() as events:
        events.register(requests, select.EPOLLIN)
        while True:
            [(ready, _)] = events.poll(maxevents=1)  # the first may close the descriptor of a second
            if ready != requests_fd:
                child = forked[ready]
                if ready == child.pidfd:
                    for fd in (child.pidfd, *child.control_fds):
                        events.unregister(fd)
                        del forked[fd]
                    _reap(child)
                else:  # the owner does not want the process any more; to wait for its end would hold up all others
                    os.kill(child.pid, signal.SIGKILL)  # the pid is not reused before `_reap`
                continue
            fds = socket.recv_fds(requests, 1, 2)[1]
            if not fds:
                return
            channel, *control_fds = fds
            pid = _fork()
            if pid == 0:
                requests.close()
                events.close()
                _close(*forked, *control_fds)
                die_with_parent(server)
                child_main(channel)
            _close(channel)
            if pid < 0:  # the owner sees every end closed
                _close(*control_fds)
                continue
            child = _Forked(pid, os.pidfd_open(pid), control_fds)
            for fd in (child.pidfd, *control_fds):
                events.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
                forked[fd] = child


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:
        _log.error("cannot fork: %s", error)
        return -1


def _reap(child: _Forked) -> None:
    """Report how a process has ended, and kill the rest of its process group."""
    with suppress(ProcessLookupError):  # the process has made no group
        os.killpg(child.pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    for fd in child.control_fds:
        with suppress(OSError):  # the other end may be closed
            os.write(fd, str(code).encode())
    _close(child.pidfd, *child.control_fds)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def tie_to_parent(parent_pid: int) -> None:
    """Make this process end when its parent ends, and at no signal that asks a server to end: the parent decides."""
    for number in END_SIGNALS:  # the processes that it forks, or executes, ignore them, too
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent_pid)


def give_way(oom_score: int) -> None:
    """Have this process, and those that it forks, give way to the API process and to processes of a lower score.

    They get less of a busy processor, and when memory runs out, the kernel kills them first. The score is the
    thousandths of the memory that it counts as used by each of them in addition. Whoever starts the server may have
    given a higher one to all of it, which stays.
    """
    os.nice(_NICENESS)
    with suppress(OSError):
        own = Path("/proc/self/oom_score_adj")
        own.write_text(str(max(oom_score, int(own.read_text()))))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, in any way; forked processes do not inherit this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os._exit(0)
