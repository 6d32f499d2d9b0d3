"""The process that workers are forked from: it has imported their libraries and done nothing else.

Started as `python -m vidspec_service.engine.fork_server FD PARENT_PID LOG_FORMAT`. Importing torch and transformers
takes seconds of a core; here that is paid once for all workers, and a worker that died is back as soon as its model is
loaded (ADR 17).

Forking is safe while there is one thread and no CUDA driver. The threads of torch and numba start with their first
work, in the worker; those of numpy never start (`forking.py`). If an import has loaded the CUDA driver, the worker
becomes a fresh interpreter instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from vidspec_service.engine import worker_main
from vidspec_service.forking import serve_forks, tie_to_parent
from vidspec_service.telemetry import configure_logging


def main(requests_fd: int, parent_pid: int, log_format: str) -> None:
    """Serve one API process."""
    tie_to_parent(parent_pid)
    configure_logging("warning", log_format)  # a worker does so again, with the settings that it gets
    worker_main.import_libraries()
    serve_forks(requests_fd, _become_worker)


def _become_worker(channel_fd: int) -> NoReturn:
    if "/libcuda.so" in Path("/proc/self/maps").read_text():
        os.set_inheritable(channel_fd, True)
        os.execv(sys.executable, [sys.executable, "-m", worker_main.__name__, str(channel_fd)])
    worker_main.exit_now(worker_main.main(channel_fd))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    worker_main.exit_now(0)
