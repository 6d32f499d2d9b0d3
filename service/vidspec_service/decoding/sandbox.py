"""What a decode child gives up before it touches a stranger's bytes. What a kernel refuses is done without, and said.

`give_up_privileges` when it starts, `limit_resources` once it knows its job, `close_in` once it holds its one file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from enum import IntFlag

from vidspec_service.decoding import syscall_filter
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


class Missing(IntFlag):
    """What a child should have and this machine does not give."""

    NETWORK_NAMESPACE = 1
    SYSCALL_FILTER = 2
    FIXED_FFMPEG = 4  # one without the known ways to take it over


def give_up_privileges(parent_pid: int) -> Missing:
    """No new privileges, no network, no tracing; dies with its parent. Call while there is one thread."""
    if sys.platform != "linux":
        return Missing.NETWORK_NAMESPACE | Missing.SYSCALL_FILTER
    missing = Missing(0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # An empty network namespace; needs root or user namespaces, and containers often allow neither.
    if libc.unshare(_CLONE_NEWNET) != 0 and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        missing |= Missing.NETWORK_NAMESPACE
    if not syscall_filter.is_supported():
        missing |= Missing.SYSCALL_FILTER
    if os.getppid() != parent_pid:  # it died before the first prctl
        sys.exit(0)
    return missing


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


def close_in() -> None:
    """From here on the process can reach nothing but what it holds open: no file, no address, no other process."""
    syscall_filter.install()
