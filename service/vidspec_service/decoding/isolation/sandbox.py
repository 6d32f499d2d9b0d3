"""What a decode child gives up before it reads a client's bytes. What a kernel does not support is reported.

`give_up_privileges` is called before the fork, `limit_resources` once the job is known, `give_up_capabilities` and
`install_filter` when the file is open. The last installs a seccomp filter: a list of the system calls that decoding
needs; the kernel refuses all others. A child that a hostile file has taken over can then compute, read the files it
already holds, answer and end. It cannot open a file, use a network, start a process or a thread, send a signal, or make
memory executable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import platform
import resource
import struct
from enum import IntFlag

from vidspec_service.decoding.clip import DecodingLimits
from vidspec_service.errors import ConfigError

_log = logging.getLogger(__name__)

# linux/prctl.h, linux/sched.h and linux/capability.h
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CAPABILITY_VERSION = 0x20080522

# linux/seccomp.h, linux/filter.h, linux/audit.h
_SECCOMP_MODE_FILTER = 2
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_PROTECTION = 0, 4, 16 + 8 * 2  # in seccomp_data; the last is an argument
_PROT_EXEC = 4
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Calls by their numbers on x86_64 and aarch64.
_ALLOWED = {
    # the video, the frames, the socket to the pool
    "read": (0, 63),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "write": (1, 64),
    "pwrite64": (18, 68),
    "close": (3, 57),
    "ftruncate": (77, 46),
    # memory
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    # what interpreter and C library do on their own
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113),
    "gettimeofday": (96, 169),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_ALLOWED_UNLESS_EXECUTABLE = {"mmap": (9, 222), "mprotect": (10, 226)}

_BASE_BYTES = 1024**3  # interpreter, libraries, container buffers
_BYTES_PER_PIXEL = 128  # 20 reference frames of 4:4:4 in 10 bits, the most that codecs keep
_MAX_OPEN_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class MissingProtection(IntFlag):
    """Protection that a child should have and this machine does not give."""

    NETWORK_NAMESPACE = 1
    SYSCALL_FILTER = 2
    FIXED_FFMPEG = 4  # an FFmpeg without the known holes


def give_up_privileges() -> MissingProtection:
    """No new privileges, no network, no tracing, for this process and all it forks. Call while there is one thread."""
    missing = MissingProtection(0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # An empty network namespace; needs root or user namespaces, and containers often allow neither.
    if _libc.unshare(_CLONE_NEWNET) != 0 and _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        missing |= MissingProtection.NETWORK_NAMESPACE
    if not is_filter_supported():
        missing |= MissingProtection.SYSCALL_FILTER
    return missing


def limit_resources(limits: DecodingLimits) -> None:
    """Limit memory, processor time, file size, descriptors, processes and core dumps to what one clip may need."""
    cpu_s = int(limits.timeout_s) + 2  # the pool's timeout is shorter; this limit holds if the pool is gone
    memory = _BASE_BYTES + limits.max_decoded_bytes + _BYTES_PER_PIXEL * limits.max_pixels
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.max_decoded_bytes),  # also limits the anonymous file of frames
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # above an inherited hard limit, which then holds
            resource.setrlimit(kind, (most, most))


def give_up_capabilities() -> None:
    """What root alone may do, as opening anybody's file before, or taking the machine's memory out of use after it.

    Raises OSError if some are left.
    """
    mine, left = struct.pack("=Ii", _CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _libc.capset(mine, bytes(24))  # some machines refuse this call, which is no harm to a process that has none
    if _libc.capget(mine, left) != 0 or any(left.raw):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be given up")


def install_filter() -> None:
    """From here on this process reaches only what it holds open: no other file, address or process.

    Cannot be undone, and holds for all it starts. Needs "no new privileges"; does nothing where it is not supported.
    Raises OSError if the kernel refuses it all the same.
    """
    if is_filter_supported():
        code = ctypes.create_string_buffer(filter_program(platform.machine()))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(code))  # a struct sock_fprog
        if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the filter cannot be installed")


def is_filter_supported() -> bool:
    """Whether this processor and kernel support the filter; changes nothing."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    # A program at address zero: a kernel that takes filters says "bad address", any other "invalid".
    refused = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0) != 0
    return refused and ctypes.get_errno() == errno.EFAULT


def filter_program(machine: str) -> bytes:
    """BPF code, eight bytes an instruction, for `x86_64` or `aarch64`.

    A call by another architecture's convention (32-bit calls on x86) kills the process: its numbers mean other calls.
    A call that is not allowed fails with EPERM, so that libraries which only try it can go on.
    """
    column = list(_ARCHITECTURES).index(machine)
    code = [
        _instruction(_LOAD, _AT_ARCHITECTURE),
        _instruction(_JUMP_EQUAL, _ARCHITECTURES[machine], if_true=1),
        _instruction(_RETURN, _RET_KILL_PROCESS),
        _instruction(_LOAD, _AT_NUMBER),
    ]
    # Each with the distance of its target from the refusal below.
    groups = (_ALLOWED_UNLESS_EXECUTABLE, 1), (_ALLOWED, 3)
    tests = [(numbers[column], target) for group, target in groups for numbers in group.values()]
    for place, (number, target) in enumerate(tests, start=1):
        code.append(_instruction(_JUMP_EQUAL, number, if_true=len(tests) - place + target))
    return b"".join(
        [
            *code,
            _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
            _instruction(_LOAD, _AT_PROTECTION),
            _instruction(_JUMP_ANY_BIT, _PROT_EXEC, if_true=1),
            _instruction(_RETURN, _RET_ALLOW),
            _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
        ]
    )


def _instruction(code: int, value: int, *, if_true: int = 0) -> bytes:
    """A struct sock_filter; a jump counts the instructions that are skipped."""
    return struct.pack("=HBBI", code, if_true, 0, value)


def report_missing(missing: MissingProtection) -> None:
    """Log what protection this machine does not give; ConfigError for an FFmpeg that files can take over.

    A missing filter is a warning; a missing network namespace is not, as the filter refuses sockets too.
    """
    if MissingProtection.FIXED_FFMPEG in missing:
        raise ConfigError("PyAV uses an FFmpeg before 8.1, which has known security holes: install av's own wheel")
    if missing:
        level = logging.WARNING if MissingProtection.SYSCALL_FILTER in missing else logging.INFO
        names = [flag.name for flag in MissingProtection if flag in missing]
        _log.log(level, "decode children are confined without", extra={"missing": names})
