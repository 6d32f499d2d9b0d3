"""The process that decode children are forked from: confined, with PyAV imported, and never near a client's bytes.

Started as `python -m vidspec_service.decoding.isolation.fork_server FD PARENT_PID`. Starting an interpreter and
importing PyAV takes 0.13 s of a core, often more than a short clip; here that is paid once (ADR 22).
"""

from __future__ import annotations

import os
import sys
from functools import partial

from vidspec_service.decoding.isolation import child
from vidspec_service.decoding.isolation.sandbox import Missing, give_up_privileges
from vidspec_service.forking import obey, serve_forks

_NICENESS = 5  # as the workers': HTTP and health checks go first


def main(requests_fd: int, parent_pid: int) -> None:
    """Serve one pool."""
    os.nice(_NICENESS)
    missing = give_up_privileges()
    obey(parent_pid)  # after it: the kernel forgets whose end is ours when a process gets another user namespace
    # The slow part of starting, which the children share; and no file can be opened once their filter is installed.
    from vidspec_service.decoding.reader import is_ffmpeg_fixed, sequence  # noqa: F401

    if not is_ffmpeg_fixed():
        missing |= Missing.FIXED_FFMPEG
    serve_forks(requests_fd, partial(child.main, missing))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
