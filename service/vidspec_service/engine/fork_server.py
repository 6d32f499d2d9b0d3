"""The process that workers are forked from: it has imported their libraries and done nothing else.

Started as `python -m vidspec_service.engine.fork_server FD`. Importing torch and transformers takes seconds of a core;
here that is paid once for all workers, and a worker that died is back as soon as its model is loaded (ADR 17). What
comes through the socket FD are the workers' channels, one a worker. It ends when the API closes the socket.

Forking is safe while there is one thread and no CUDA driver: the threads of torch and numba start with their first
work, in the worker, those of numpy never (`forking.py`), and where an import has touched the driver the worker becomes
a fresh interpreter instead.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from vidspec_service.engine import worker_main

logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serve one API process; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API decides when workers stop
    worker_main.die_with_parent()
    worker_main.import_libraries()
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, pages that all workers share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers here: the kernel buries them
    with socket.socket(fileno=fd) as requests:
        while fds := socket.recv_fds(requests, 1, 1)[1]:
            try:
                is_worker = os.fork() == 0
            except OSError as error:  # the supervisor sees the closed channel and asks again, later
                logger.error("cannot start a worker: %s", error)
                is_worker = False
            if is_worker:
                requests.close()
                return _become_worker(fds[0])
            os.close(fds[0])
    return 0


def _become_worker(channel_fd: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # compilers are started, and waited for, by a worker
    if "/libcuda.so" in Path("/proc/self/maps").read_text():
        os.set_inheritable(channel_fd, True)
        os.execv(sys.executable, [sys.executable, "-m", worker_main.__name__, str(channel_fd)])
    return worker_main.main(channel_fd)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    # Unloading torch takes seconds and frees nothing that the kernel does not: sockets and memory are anonymous.
    logging.shutdown()
    os._exit(code)
