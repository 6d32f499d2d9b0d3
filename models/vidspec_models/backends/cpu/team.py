"""Team: threads that run one kernel together; each takes the next free part of the current task.

A part has the same result in any thread, and a task ends when all its parts are done. So nobody waits for a thread
without a core, except for a part that it has begun; a late thread finds tasks without free parts until it has caught up
or the kernel ends. So any number of threads can take part, and a row's bits stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, get_native_id
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils

from vidspec_models.backends.cpu.kernel_cache import compiled
from vidspec_models.backends.cpu.packing import Array
from vidspec_models.backends.cpu.vectors import I32, I64, Emitter, emitted
from vidspec_models.core_share import CoreAvoidance

_START_TIMEOUT_S = 10.0
_LINE, _LINE_BYTES = 16, 128  # unit that moves between cores' caches, in int64 and bytes: a line and its neighbour
_FIRST, _LAST, _HOLDS = range(3)
_ALL_TAKEN = 2**62
_SPINS = 2000  # some microseconds; then yield the core to threads that wait for it
_YIELDS = 1000  # half a millisecond; then nap, so that threads waiting for another core can move to this one
_NAP_US = 50
_PATIENCE = 2**20  # naps; at least a minute


class Member(NamedTuple):
    """One of a team's threads."""

    team_size: int
    parts: int  # address of two lines, initially 0: number of parts taken so far, and number of parts done
    own: Array  # int64 [3], initially 0: begin, end of the task's parts; whether one is held (alone: its number from 1)


def joined(team_size: int, parts: int) -> Member:
    """A member at the beginning of a kernel."""
    return Member(team_size, parts, np.zeros(_HOLDS + 1, np.int64))


def alone() -> Member:
    """A team of one."""
    return joined(1, 0)


class Team:
    """The calling thread and others, which wait for work between calls."""

    def __init__(self, size: int) -> None:
        """Starts all threads, since a thread that fails to start later would leave the others waiting.

        Raises RuntimeError if the system has no more threads.
        """
        self.size = size
        ready = Barrier(size)

        def begin() -> int:
            ready.wait()
            return get_native_id()

        # Exactly one thread per other member.
        self._others = ThreadPoolExecutor(max(size - 1, 1), thread_name_prefix="step")
        try:
            begun = [self._others.submit(begin) for _ in range(size - 1)]
            ready.wait(_START_TIMEOUT_S)
        except RuntimeError:
            ready.abort()
            self._others.shutdown()
            raise
        self._core_avoidance = CoreAvoidance([each.result() for each in begun])

    def run(self, count: int, work: Callable[[Member], None], late_s: float = 0.0) -> None:
        """Run `work` in `count` members (at most all), including the calling thread; returns when all parts are done.

        A member that gets no core in time does nothing, or ends later, when it finds no part left. One of them joins
        only after `late_s` seconds.
        """
        if count == 1:
            work(alone())
            return
        self._core_avoidance.update()  # two threads that wait for each other on one core take longer than one alone
        parts = np.zeros(2 * _LINE, np.int64)
        over = Event()
        others = [self._others.submit(_join, work, count, parts) for _ in range(2, count)]
        others.append(self._others.submit(_join, work, count, parts, over, late_s))
        try:
            work(joined(count, parts.ctypes.data))
        finally:
            parts[0] = _ALL_TAKEN  # also on failure: when a late thread starts, the caches may be gone
            over.set()
            for other in others:
                if not other.cancel() and other.done():
                    other.result()  # raises what it raised


def _join(
    work: Callable[[Member], None], count: int, parts: Array, over: Event | None = None, late_s: float = 0.0
) -> None:
    """Join after `late_s`, unless it is over by then.

    Takes the array, not only its address, to keep it alive: a late thread reads it after the call has ended.
    """
    if over is None or not late_s or not over.wait(late_s):
        work(joined(count, parts.ctypes.data))


@compiled
def share(part: int, num_parts: int, total: int) -> tuple[int, int]:
    """Begin and end of a part's share of `total` things."""
    return total * part // num_parts, total * (part + 1) // num_parts


@compiled
def take_part(member: Member) -> int:
    """Take a free part of the task, counted from 0; -1 if there is none. Marks this member's previous part as done."""
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
    """Begin the next task; returns the first part that this member takes of it, or -1.

    All members must begin and end the same tasks in the same order.
    """
    member.own[_FIRST] = member.own[_LAST]
    member.own[_LAST] += num_parts
    return int(take_part(member))


@compiled
def end_task(member: Member) -> None:
    """Wait until all parts of the task are done; afterwards all members can read what any member wrote.

    Raises RuntimeError if a part is not done within a minute: its member has failed.
    """
    if member.team_size == 1:
        return
    tries = 0
    while _number(member.parts + _LINE_BYTES) < member.own[_LAST]:
        tries += 1
        if tries > _SPINS + _YIELDS + _PATIENCE:
            raise RuntimeError("a thread of the team is missing")
        if tries > _SPINS + _YIELDS:
            _nap()  # the scheduler is slow to move other threads to a core that is never idle
        elif tries > _SPINS:
            _give_way()


@emitted(types.int64)
def now_ns(emitter: Emitter) -> Any:
    """The time of `time.monotonic_ns`."""
    builder = emitter.builder
    seconds = cgutils.alloca_once(builder, I64, 2)  # and nanoseconds
    emitter.call("clock_gettime", I32, [I32(time.CLOCK_MONOTONIC), seconds])
    nanoseconds = builder.gep(seconds, [I32(1)])
    return builder.add(builder.mul(builder.load(seconds), I64(10**9)), builder.load(nanoseconds))


@emitted()
def _add(emitter: Emitter, number: Any) -> None:
    """Atomically add 1 to the int64 at an address."""
    emitter.builder.atomic_rmw("add", emitter.builder.inttoptr(number, I64.as_pointer()), I64(1), "acq_rel")


@emitted(types.int64)
def _exchange(emitter: Emitter, number: Any, expected: Any, new: Any) -> Any:
    """Atomic compare-and-swap of the int64 at an address; returns the number found there."""
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
