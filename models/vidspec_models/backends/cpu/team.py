"""Team: threads that go through one kernel together and take the parts of each of its tasks, whoever comes first.

A part has the same result whoever computes it, and a task is over when all its parts are done: nobody waits for a
thread that has no core, but for the part that it has begun. One that comes late finds tasks without parts until it has
caught up, or the kernel's end. So their number is free, and a row's bits stay the same.
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
from numba import types
from numba.core import cgutils

from vidspec_models.backends.cpu.layers import compiled
from vidspec_models.backends.cpu.packing import Array
from vidspec_models.backends.cpu.vectors import I32, I64, Emitter, emitted

_START_TIMEOUT_S = 10.0
_LINE, _LINE_BYTES = 16, 128  # int64 of what one core takes from another's cache: a line and its neighbour
_FIRST, _LAST, _HOLDS = range(3)
_ALL_TAKEN = 2**62
_SPINS = 2000  # some microseconds; then whoever waits for this core may have it
_YIELDS = 1000  # half a millisecond; then whoever waits for another core may come over
_NAP_US = 50
_PATIENCE = 2**20  # naps; a minute at least

_libc = ctypes.CDLL(None)


class Member(NamedTuple):
    """One of a team's threads."""

    team_size: int
    parts: int  # address of two lines, noughts at the beginning: how many parts were taken so far, and how many done
    own: Array  # int64 [3], likewise: where the current task's parts begin and end, and what was taken of them


def joined(team_size: int, parts: int) -> Member:
    """At the beginning of a kernel."""
    return Member(team_size, parts, np.zeros(_HOLDS + 1, np.int64))


def alone() -> Member:
    """A team of one."""
    return joined(1, 0)


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
        """`work` by so many members, at most all, the calling thread among them; returns when all parts are done.

        A member that has no core meanwhile does nothing, or ends later, when it finds nothing left to do.
        """
        if count == 1:
            work(alone())
            return
        self._leave_my_core()
        parts = np.zeros(2 * _LINE, np.int64)
        others = [self._others.submit(_join, work, count, parts) for _ in range(1, count)]
        try:
            work(joined(count, parts.ctypes.data))
        finally:
            parts[0] = _ALL_TAKEN  # where this thread has failed, too: caches may be gone before another one comes
            for other in others:
                if not other.cancel() and other.done():
                    other.result()  # raises what it raised

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


def _join(work: Callable[[Member], None], count: int, parts: Array) -> None:
    """The array and not its address alone, since who comes late reads it when the call is over."""
    work(joined(count, parts.ctypes.data))


@compiled
def share(part: int, num_parts: int, total: int) -> tuple[int, int]:
    """First and last of a part's share of so many things."""
    return total * part // num_parts, total * (part + 1) // num_parts


@compiled
def take_part(member: Member) -> int:
    """A part of the task that nobody has taken, from 0, or -1; what this member has taken before it has done."""
    own = member.own
    if member.team_size == 1:
        own[_HOLDS] = own[_HOLDS] + 1 if own[_FIRST] + own[_HOLDS] < own[_LAST] else 0
        return int(own[_HOLDS] - 1)
    if own[_HOLDS]:
        own[_HOLDS] = 0
        _add(member.parts + _LINE_BYTES)
    taken = _number(member.parts)
    while taken < own[_LAST]:
        found = _exchange(member.parts, taken, taken + 1)
        if found == taken:
            own[_HOLDS] = 1
            return int(taken - own[_FIRST])
        taken = found
    return -1


@compiled
def begin_task(member: Member, num_parts: int) -> int:
    """The next task, and the first part that this member takes of it, or -1.

    All members begin the same tasks one after the other, and end each.
    """
    member.own[_FIRST] = member.own[_LAST]
    member.own[_LAST] += num_parts
    return int(take_part(member))


@compiled
def end_task(member: Member) -> None:
    """Wait until all parts of the task are done; what was written by any member, all can read afterwards.

    Raises RuntimeError where one is not done for a minute: its member has failed.
    """
    if member.team_size == 1:
        return
    tries = 0
    while _number(member.parts + _LINE_BYTES) < member.own[_LAST]:
        tries += 1
        if tries > _SPINS + _YIELDS + _PATIENCE:
            raise RuntimeError("a thread of the team is missing")
        if tries > _SPINS + _YIELDS:
            _nap()  # a core that is never idle is not given another one's work for a long time
        elif tries > _SPINS:
            _give_way()


@emitted(types.int64)
def now_ns(emitter: Emitter) -> Any:
    """As `time.monotonic_ns` has it."""
    builder = emitter.builder
    seconds = cgutils.alloca_once(builder, I64, 2)  # and nanoseconds
    emitter.call("clock_gettime", I32, [I32(time.CLOCK_MONOTONIC), seconds])
    nanoseconds = builder.gep(seconds, [I32(1)])
    return builder.add(builder.mul(builder.load(seconds), I64(10**9)), builder.load(nanoseconds))


@emitted()
def _add(emitter: Emitter, number: Any) -> None:
    """One to the int64 at an address."""
    emitter.builder.atomic_rmw("add", emitter.builder.inttoptr(number, I64.as_pointer()), I64(1), "acq_rel")


@emitted(types.int64)
def _exchange(emitter: Emitter, number: Any, expected: Any, new: Any) -> Any:
    """What is at an address, and the new number there if it was what is expected."""
    place = emitter.builder.inttoptr(number, I64.as_pointer())
    found = emitter.builder.cmpxchg(place, expected, new, "acq_rel", "acquire")
    return emitter.builder.extract_value(found, 0)


@emitted(types.int64)
def _number(emitter: Emitter, number: Any) -> Any:
    return emitter.builder.load_atomic(emitter.builder.inttoptr(number, I64.as_pointer()), "acquire", 8)


@emitted()
def _give_way(emitter: Emitter) -> None:
    emitter.call("sched_yield", I32, [])


@emitted()
def _nap(emitter: Emitter) -> None:
    emitter.call("usleep", I32, [I32(_NAP_US)])
