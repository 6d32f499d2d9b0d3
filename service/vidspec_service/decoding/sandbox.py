"""What a decode child gives up before it touches a stranger's bytes. What a kernel refuses is done without.

The seam for stronger confinement (seccomp, Landlock): both functions run before the file is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

from vidspec_service.decoding.limits import DecodingLimits

# linux/prctl.h and linux/sched.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_MIB = 1024 * 1024
_BASE_BYTES = 1024 * _MIB  # interpreter, libraries, container buffers
_BYTES_PER_PIXEL = 128  # 20 reference frames of 4:4:4 in 10 bits, the most that codecs keep
_MAX_OPEN_FILES = 64


def give_up_privileges(parent_pid: int) -> None:
    """No new privileges, no network, no tracing; dies with its parent. Call while there is one thread."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # An empty network namespace; needs root or user namespaces, and containers often allow neither.
    if libc.unshare(_CLONE_NEWNET) != 0:
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    if os.getppid() != parent_pid:  # it died before the first prctl
        sys.exit(0)


def limit_resources(limits: DecodingLimits) -> None:
    """Memory, processor time, file size, descriptors, processes and core dumps, by what one clip may need."""
    cpu_s = int(limits.timeout_s) + 2  # the pool's clock comes first; this one holds if the pool is gone
    memory = _BASE_BYTES + limits.max_decoded_bytes + _BYTES_PER_PIXEL * limits.max_pixels
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.max_decoded_bytes),  # holds for the anonymous file of frames, too
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # above an inherited hard limit, which then holds
            resource.setrlimit(kind, (most, most))
