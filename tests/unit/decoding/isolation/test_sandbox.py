"""The seccomp filter, run by an interpreter of the few BPF instructions that it uses."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.decoding.isolation.sandbox import filter_program

pytestmark = pytest.mark.unit

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
READ = {"x86_64": 0, "aarch64": 63}
MMAP = {"x86_64": 9, "aarch64": 222}
FCNTL = {"x86_64": 72, "aarch64": 25}  # could make the kernel send any signal to any process of the user
SOCKET = {"x86_64": 41, "aarch64": 198}
OPENAT = {"x86_64": 257, "aarch64": 56}
EXECVE = {"x86_64": 59, "aarch64": 221}
CLONE = {"x86_64": 56, "aarch64": 220}
MACHINES = list(ARCHITECTURES)


def verdict(program: bytes, number: int, architecture: int, arguments: tuple[int, ...] = (0,) * 6) -> int:
    """The filter's verdict on a system call: runs the program on its struct seccomp_data, as the kernel does."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments)
    code = list(struct.iter_unpack("=HBBI", program))
    place, value = 0, 0
    while True:
        operation, if_true, if_false, constant = code[place]
        place += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x15:
            place += if_true if value == constant else if_false
        elif operation == 0x45:
            place += if_true if value & constant else if_false
        else:
            assert operation == 0x06
            return int(constant)


@pytest.mark.parametrize("machine", MACHINES)
def test_reading_is_allowed_and_whatever_reaches_out_is_refused(machine: str) -> None:
    program, architecture = filter_program(machine), ARCHITECTURES[machine]
    assert verdict(program, READ[machine], architecture) == ALLOW
    for numbers in (SOCKET, OPENAT, EXECVE, CLONE, FCNTL):
        assert verdict(program, numbers[machine], architecture) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
@given(protection=st.integers(0, 7))
def test_memory_may_be_mapped_unless_it_is_executable(machine: str, protection: int) -> None:
    arguments = (0, 4096, protection, 0, 0, 0)
    expected = REFUSE if protection & 4 else ALLOW
    assert verdict(filter_program(machine), MMAP[machine], ARCHITECTURES[machine], arguments) == expected


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 2**31 - 1), architecture=st.integers(0, 2**32 - 1))
def test_calls_of_another_architecture_kill(machine: str, number: int, architecture: int) -> None:
    if architecture != ARCHITECTURES[machine]:
        assert verdict(filter_program(machine), number, architecture) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(500, 2**31 - 1))
def test_calls_that_do_not_exist_yet_are_refused(machine: str, number: int) -> None:
    assert verdict(filter_program(machine), number, ARCHITECTURES[machine]) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_little_is_allowed(machine: str) -> None:
    program = filter_program(machine)
    allowed = [n for n in range(500) if verdict(program, n, ARCHITECTURES[machine]) == ALLOW]
    assert 25 < len(allowed) < 40
