"""The process that decode children are forked from: confined, with PyAV imported, and never near a client's bytes.

Started as `python -m vidspec_service.decoding.isolation.fork_server FD PARENT_PID`. Starting an interpreter and
importing PyAV takes 0.13 s of a core, often more than a short clip; here that is paid once (ADR 22).
"""

from __future__ import annotations

import os
import sys
from functools import partial

from vidspec_service.decoding.isolation import child
from vidspec_service.decoding.isolation.sandbox import MissingProtection, give_up_privileges
from vidspec_service.forking import prefer_oom_kill, serve_forks, tie_to_parent

_NICENESS = 5  # as that of the workers: HTTP and health checks go first
_OOM_SCORE = 1000  # the most: a video that fills the memory must not cost a worker


def main(requests_fd: int, parent_pid: int) -> None:
    """Serve one pool."""
    os.nice(_NICENESS)
    prefer_oom_kill(_OOM_SCORE)
    missing = give_up_privileges()
    tie_to_parent(parent_pid)  # last: in a new user namespace the kernel forgets to end us with our parent
    # The slow part of a start, done once for all children, which cannot open a file once their filter is installed.
    from vidspec_service.decoding.reader import is_ffmpeg_fixed, sequence  # noqa: F401

    if not is_ffmpeg_fixed():
        missing |= MissingProtection.FIXED_FFMPEG
    serve_forks(requests_fd, partial(child.main, missing))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
