"""ForkServer: owns a process that has imported what others need, and has it fork one of these for every request."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress


class ForkServer:
    """It starts with the first fork and again if it has died; what it has forked dies with it.

    The kernel ends it when the thread that started it ends. Any thread may call.
    """

    def __init__(self, module: str, *, is_bare: bool = False) -> None:
        """`module` is run with the descriptor that requests come through, and our process id.

        A bare one gets nothing of ours: no environment, no working folder, no output.
        """
        self._module = module
        self._is_bare = is_bare
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def launch(self, *fds: int) -> None:
        """Fork a process that gets these descriptors; what becomes of it is seen at their other ends."""
        with self._lock:
            self._start()
            if self._requests is not None:
                with suppress(OSError):  # it is dying, or hangs
                    socket.send_fds(self._requests, [b"f"], fds)

    def start(self) -> None:
        """Start it unless it runs; `launch` does this by itself."""
        with self._lock:
            self._start()

    def restart(self) -> None:
        """Start it, in the place of any earlier one."""
        with self._lock:
            self._end()
            self._start()

    def close(self) -> None:
        """End it, and with it everything that it has forked."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._server is not None and self._server.poll() is None:
            return
        self._end()
        bare = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # nothing of ours: no keys to steal
        environment = bare if self._is_bare else os.environ  # noqa: TID251  handed on as it is
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.setblocking(False)
        try:
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if self._is_bare else None,
                    stderr=subprocess.DEVNULL if self._is_bare else None,
                    # Forking is safe with one thread. What numpy brings starts one a core when it is imported.
                    env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                    cwd="/" if self._is_bare else None,
                )
        except OSError:
            requests.close()
            raise
        self._requests = requests

    def _end(self) -> None:
        if self._requests is not None and self._server is not None:
            self._requests.close()
            self._server.kill()  # it keeps nothing; importing, it would not hear a milder word
            self._server.wait()
        self._requests = self._server = None
