"""Team: threads that go through one kernel together, each with its share of every product, and wait for each other.

What a thread computes does not depend on how many there are, so that their number is free: a row's bits stay the same.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, get_native_id
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vidspec_models.backends.cpu.layers import compiled

_START_TIMEOUT_S = 10.0
_LINE = 8  # int64 of a cache line
_I64 = ir.IntType(64)
_SPINS = 2000  # some microseconds; then whoever waits for this core may have it
_YIELDS = 1000  # half a millisecond; then whoever waits for another core may come over
_NAP_US = 50
_PATIENCE = 2**20  # naps; a minute at least

_libc = ctypes.CDLL(None)


class Member(NamedTuple):
    """One of a team's threads."""

    number: int  # from 0
    team_size: int
    meeting: int  # address of an int64, 0 at the beginning: how many have come to a meeting so far


class Team:
    """The thread that calls, and others that wait for it meanwhile."""

    def __init__(self, size: int) -> None:
        """All are started here: one that could not be would leave the others waiting.

        Raises RuntimeError where the system has no more threads.
        """
        ready = Barrier(size)

        def begin() -> int:
            ready.wait()
            return get_native_id()

        # No more than these, so that every member has one of its own.
        self._others = ThreadPoolExecutor(max(size - 1, 1), thread_name_prefix="step")
        try:
            begun = [self._others.submit(begin) for _ in range(size - 1)]
            ready.wait(_START_TIMEOUT_S)
        except RuntimeError:
            ready.abort()
            self._others.shutdown()
            raise
        self._ids = [each.result() for each in begun]
        self._their_cores = set[int]()

    def run(self, count: int, work: Callable[[Member], None]) -> None:
        """`work` by so many members, at most all, the calling thread among them; returns when all have done theirs."""
        if count > 1:
            self._leave_my_core()
        meeting = np.zeros(_LINE, np.int64)  # so that nothing else lies near it
        members = [Member(number, count, meeting.ctypes.data) for number in range(count)]
        others = [self._others.submit(work, member) for member in members[1:]]
        work(members[0])
        for other in others:
            other.result()

    def _leave_my_core(self) -> None:
        """Linux may wake a thread on the core of who wakes it, after a pause in one case of six, and leave both there
        for milliseconds: two that wait for each other then take longer than one alone.
        """
        cores = os.sched_getaffinity(0) - {_libc.sched_getcpu()}
        if cores and cores != self._their_cores:
            self._their_cores = cores
            with suppress(OSError):  # a sandbox may forbid it
                for thread in self._ids:
                    os.sched_setaffinity(thread, cores)


@compiled
def share(member: Member, total: int) -> tuple[int, int]:
    """First and last of a member's part of so many things that all have to be done."""
    return total * member.number // member.team_size, total * (member.number + 1) // member.team_size


@compiled
def meet(member: Member) -> None:
    """Wait until all are here; what any of them has written, all can read afterwards.

    Raises RuntimeError where one does not come for a minute: it has failed.
    """
    if member.team_size == 1:
        return
    awaited = (_come(member.meeting) // member.team_size + 1) * member.team_size
    tries = 0
    while _number_come(member.meeting) < awaited:
        tries += 1
        if tries > _SPINS + _YIELDS + _PATIENCE:
            raise RuntimeError("a thread of the team is missing")
        if tries > _SPINS + _YIELDS:
            _nap()  # a core that is never idle is not given another one's work for a long time
        elif tries > _SPINS:
            _give_way()


@intrinsic
def now_ns(_typing: Any) -> Any:
    """As `time.monotonic_ns` has it."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _I64.as_pointer()])
        clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        seconds = cgutils.alloca_once(builder, _I64, 2)  # and nanoseconds
        builder.call(clock, [ir.IntType(32)(time.CLOCK_MONOTONIC), seconds])
        nanoseconds = builder.gep(seconds, [ir.IntType(32)(1)])
        return builder.add(builder.mul(builder.load(seconds), _I64(10**9)), builder.load(nanoseconds))

    return types.int64(), generate


@intrinsic
def _come(_typing: Any, meeting: Any) -> Any:
    """How many had come before."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(meeting), generate


@intrinsic
def _number_come(_typing: Any, meeting: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(meeting), generate


@intrinsic
def _give_way(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def _nap(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "usleep"), [ir.IntType(32)(_NAP_US)])
        return context.get_dummy_value()

    return types.none(), generate
