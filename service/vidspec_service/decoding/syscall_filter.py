"""A seccomp filter for decode children: a list of the system calls that decoding needs; the kernel refuses all others.

With it a child that a hostile file has taken over can compute, read the files it already holds, answer and end. It
cannot open a file, use a network, start a process or a thread, send a signal, or make memory executable.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from typing import NamedTuple

# linux/seccomp.h, linux/filter.h, linux/audit.h
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_PROTECTION = 0, 4, 16 + 8 * 2  # offsets in struct seccomp_data; third argument
_PROT_EXEC = 4
_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7


class _Call(NamedTuple):
    """A system call's numbers."""

    x86_64: int
    aarch64: int


_ALLOWED = {
    # the video, the frames, the socket to the pool
    "read": _Call(0, 63),
    "pread64": _Call(17, 67),
    "lseek": _Call(8, 62),
    "fstat": _Call(5, 80),
    "write": _Call(1, 64),
    "close": _Call(3, 57),
    "fcntl": _Call(72, 25),
    "memfd_create": _Call(319, 279),
    "ftruncate": _Call(77, 46),
    "recvfrom": _Call(45, 207),
    "sendto": _Call(44, 206),
    "sendmsg": _Call(46, 211),
    # memory
    "brk": _Call(12, 214),
    "munmap": _Call(11, 215),
    "mremap": _Call(25, 216),
    "madvise": _Call(28, 233),
    # what interpreter and C library do on their own
    "futex": _Call(202, 98),
    "sched_yield": _Call(24, 124),
    "sched_getaffinity": _Call(204, 123),
    "clock_gettime": _Call(228, 113),
    "gettimeofday": _Call(96, 169),
    "getrandom": _Call(318, 278),
    "getpid": _Call(39, 172),
    "gettid": _Call(186, 178),
    "rt_sigaction": _Call(13, 134),
    "rt_sigprocmask": _Call(14, 135),
    "rt_sigreturn": _Call(15, 139),
    "restart_syscall": _Call(219, 128),
    "exit": _Call(60, 93),
    "exit_group": _Call(231, 94),
}
_ALLOWED_UNLESS_EXECUTABLE = {"mmap": _Call(9, 222), "mprotect": _Call(10, 226)}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_supported() -> bool:
    """Whether `install` would work here; changes nothing."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    # A program at address zero: a kernel that takes filters says "bad address", any other "invalid".
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0) != 0 and ctypes.get_errno() == errno.EFAULT


def install() -> bool:
    """Confine this thread and all it starts, for good. Needs "no new privileges". False if the kernel refuses."""
    if not is_supported():
        return False
    code = filter_program(platform.machine())
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    refused: int = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    return refused == 0


def filter_program(machine: str) -> bytes:
    """BPF code, eight bytes an instruction, for `x86_64` or `aarch64`.

    Another architecture's calling convention (32-bit calls on x86) kills: its numbers mean other calls. What is not
    allowed fails with EPERM, so that libraries which merely ask can go on.
    """
    is_x86 = machine == "x86_64"
    free = [call.x86_64 if is_x86 else call.aarch64 for call in _ALLOWED.values()]
    checked = [call.x86_64 if is_x86 else call.aarch64 for call in _ALLOWED_UNLESS_EXECUTABLE.values()]
    tests = [*checked, *free]
    code = [
        _instruction(_LOAD, _AT_ARCHITECTURE),
        _instruction(_JUMP_EQUAL, _X86_64 if is_x86 else _AARCH64, if_true=1),
        _instruction(_RETURN, _RET_KILL_PROCESS),
        _instruction(_LOAD, _AT_NUMBER),
    ]
    for place, number in enumerate(tests):
        to_refusal = len(tests) - place - 1  # instructions between this one and the refusal
        target = to_refusal + (1 if number in checked else 4)
        code.append(_instruction(_JUMP_EQUAL, number, if_true=target))
    return b"".join(
        [
            *code,
            _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
            _instruction(_LOAD, _AT_PROTECTION),
            _instruction(_JUMP_ANY_BIT, _PROT_EXEC, if_false=1),
            _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
            _instruction(_RETURN, _RET_ALLOW),
        ]
    )


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """A struct sock_filter; jumps count the instructions that are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
