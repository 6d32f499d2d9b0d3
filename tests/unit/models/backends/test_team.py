"""Threads that compute one step together give the bits of a single thread, whatever their number and waits."""

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.models.backends.test_cpu_step import Stepper, build, tokens
from tests.unit.models.random_models import FAMILIES
from vidspec_models.backends.cpu import team
from vidspec_models.backends.cpu.kernel_cache import compiled
from vidspec_models.backends.cpu.packing import Array
from vidspec_models.backends.cpu.team import (
    Member,
    Team,
    begin_task,
    end_task,
    joined,
    now_ns,
    share,
    take_part,
)
from vidspec_models.core_share import torch_threads
from vidspec_models.decoder.decoder import Segment

pytestmark = pytest.mark.unit


@given(total=st.integers(0, 50), num_parts=st.integers(1, 12))
def test_all_is_shared_out_once_and_fairly(total: int, num_parts: int) -> None:
    parts = [share(part, num_parts, total) for part in range(num_parts)]
    assert [each for begin, end in parts for each in range(begin, end)] == list(range(total))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1


@compiled
def running_sums(member: Member, who: int, num_tasks: int, num_parts: int, sums: Array, takers: Array) -> None:
    """Each part of a task sums all parts of the previous task: `sums` [tasks + 1, parts], with its first row given."""
    for task in range(num_tasks):
        part = begin_task(member, num_parts)
        while part >= 0:
            takers[task, part] += 1 << (8 * who)
            for before in range(num_parts):
                sums[task + 1, part] += sums[task, before] % 1000 + part
            part = take_part(member)
        end_task(member)


class Sums:
    """Many small tasks, each of which depends on the whole previous task."""

    def __init__(self, num_parts: int, num_tasks: int = 300) -> None:
        self.size = num_tasks, num_parts
        self.sums = np.zeros((num_tasks + 1, num_parts), np.int64)
        self.sums[0] = np.arange(num_parts)
        self.takers = np.zeros(self.size, np.int64)
        self._numbers = itertools.count()

    def __call__(self, member: Member) -> None:
        running_sums(member, next(self._numbers), *self.size, self.sums, self.takers)

    @property
    def are_right(self) -> bool:
        """Whether every part was computed once, by one thread, after the previous task was complete."""
        num_parts, found, takers = self.size[1], self.sums, self.takers
        sums = (found[:-1] % 1000).sum(1, keepdims=True) + num_parts * np.arange(num_parts)
        return bool((found[1:] == sums).all() and (takers > 0).all() and (takers & (takers - 1) == 0).all())


@pytest.mark.parametrize(("team_size", "num_parts"), [(1, 5), (2, 1), (2, 7), (3, 2), (7, 16)])
def test_every_part_is_done_once_and_before_the_next_task(team_size: int, num_parts: int) -> None:
    """Also with seven threads on two cores."""
    sums = Sums(num_parts)
    Team(team_size).run(team_size, sums)
    assert sums.are_right


def test_nobody_waits_for_who_is_late_and_who_is_late_changes_nothing() -> None:
    together, gate, has_come = Team(2), threading.Event(), threading.Event()
    sums, here, begun = Sums(4), threading.current_thread(), threading.Event()

    def come_late(member: Member) -> None:
        if threading.current_thread() is not here:
            begun.set()  # a thread that has not begun by the end may no longer begin
            gate.wait(10)
            sums(member)
            has_come.set()
        else:
            begun.wait(10)
            sums(member)

    together.run(2, come_late)
    assert (sums.takers == 1).all(), "all parts by who calls"
    following = Sums(4)
    together.run(2, following)
    assert (following.takers == 1).all()
    assert not has_come.is_set()
    before = sums.sums.copy()
    gate.set()
    assert has_come.wait(10)
    assert (sums.sums == before).all()
    assert sums.are_right


def test_who_comes_after_a_failure_has_nothing_to_do() -> None:
    gate, has_come, here = threading.Event(), threading.Event(), threading.current_thread()
    begun = threading.Event()

    def fail(member: Member) -> None:
        if threading.current_thread() is here:
            begun.wait(10)
            raise MemoryError
        begun.set()
        gate.wait(10)
        assert begin_task(member, 4) == -1
        has_come.set()

    with pytest.raises(MemoryError):
        Team(2).run(2, fail)
    gate.set()
    assert has_come.wait(10)


def test_what_another_thread_raises_is_raised() -> None:
    together, here, failed = Team(2), threading.current_thread(), threading.Event()

    def fail(_: Member) -> None:
        if threading.current_thread() is not here:
            failed.set()
            raise ValueError("of another thread")
        failed.wait(10)
        together._others.submit(int).result(10)  # the thread is free again, so it has reported

    with pytest.raises(ValueError, match="of another"):
        together.run(2, fail)


@compiled
def kernels_clock() -> int:
    return int(now_ns())


def test_one_member_may_join_late_and_does_not_once_it_is_over() -> None:
    team, joined_by, both = Team(2), list[int](), threading.Barrier(2)

    def meet(member: Member) -> None:
        joined_by.append(threading.get_ident())
        both.wait(60)

    team.run(2, meet, late_s=0.01)
    assert len(set(joined_by)) == 2
    team.run(2, lambda member: joined_by.append(threading.get_ident()), late_s=600)
    team._others.shutdown()
    assert joined_by[2:] == [threading.get_ident()]


def test_kernels_know_the_time() -> None:
    before = time.monotonic_ns()
    assert before <= kernels_clock() <= time.monotonic_ns()


def test_nobody_waits_for_ever_for_one_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_PATIENCE", 10_000)
    parts = np.zeros(32, np.int64)
    mine, theirs = (joined(2, parts.ctypes.data) for _ in range(2))
    assert (begin_task(theirs, 1), begin_task(mine, 1)) == (0, -1)
    with pytest.raises(RuntimeError, match="missing"):
        numba.njit(end_task.py_func)(mine)


def test_threads_that_cannot_be_had_leave_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepper(build("qwen2")).step
    submit, before = ThreadPoolExecutor.submit, threading.active_count()

    def refuse_second(pool: ThreadPoolExecutor, *work: Any) -> Any:
        if pool._threads:
            raise RuntimeError("can't start new thread")
        return submit(pool, *work)

    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", refuse_second)
        with pytest.raises(RuntimeError, match="new thread"):
            step.use_threads(3)
    assert threading.active_count() <= before + 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_nobody_shares_the_core_of_who_calls() -> None:
    together, cores = Team(3), os.sched_getaffinity(0)
    others = together._core_avoidance._threads
    assert len(set(others) - {threading.get_native_id()}) == 2
    together.run(1, lambda member: None)
    assert all(os.sched_getaffinity(thread) == cores for thread in others)
    together.run(3, lambda member: None)
    assert all(len(os.sched_getaffinity(thread)) == len(cores) - 1 for thread in others)
    assert os.sched_getaffinity(0) == cores


def test_a_team_works_where_nobody_may_choose_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    sums = Sums(2)
    Team(2).run(2, sums)
    assert sums.are_right


def test_who_is_alone_goes_on_with_what_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(build("qwen2"))
    before = stepper.run((stepper.cache(), tokens(3, 4)))

    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", refuse)
        stepper.step.use_when_alone(2)
    assert stepper.step.num_threads == stepper.step.alone.choose(0.0) == 1
    assert torch.equal(stepper.run((stepper.cache(), tokens(3, 4))), before)


@pytest.mark.parametrize(("counts", "expected"), [((3,), 1), ((2, 1), 2), ((1, 1, 1), 2)])
def test_rows_of_several_requests_are_everybodys(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], expected: int
) -> None:
    """One row leaves a core to the draft; several requests use all threads, since the draft has little to do then."""
    stepper, taken = Stepper(build("qwen2")), list[int]()
    run = Team.run

    def noted(together: Team, count: int, work: Any) -> None:
        taken.append(count)
        run(together, count, work)

    monkeypatch.setattr(Team, "run", noted)
    with torch_threads(2):
        stepper.step.use_threads(1, 2)
        stepper.run(*[(stepper.cache(), tokens(count, 4)) for count in counts])
    assert taken == [expected]


class Measured:
    """A TeamSize that wants two threads and notes what it is told."""

    def __init__(self) -> None:
        self.told = list[tuple[int, float]]()
        self.num_asked = 0

    def choose(self, now: float) -> int:
        self.num_asked += 1
        return 2

    def observe(self, size: int, token_s: float, now: float) -> None:
        self.told.append((size, token_s))


def test_what_many_rows_or_a_lone_request_take_is_measured_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not with fewer threads than were wanted, since a core is lent."""
    stepper, many, alone = Stepper(build("qwen2")), Measured(), Measured()
    clock = SimpleNamespace(monotonic=map(float, itertools.count(0, 4)).__next__)
    stepper.step.use_threads(1, 2)
    for name, value in (("many_rows", many), ("alone", alone)):
        monkeypatch.setattr(stepper.step, name, value)
    monkeypatch.setattr("vidspec_models.backends.cpu.step.time", clock)
    with torch_threads(2):
        stepper.run((stepper.cache(), tokens(7, 4)))
        assert many.num_asked == 0
        stepper.run((stepper.cache(), tokens(8, 4)))
        stepper.decoder.cores.lend(600)
        stepper.run((stepper.cache(), tokens(8, 4)))
        assert many.told == [(2, 0.5)]
        segment, noise = Segment(stepper.cache(), 0, 1), torch.zeros(8, 97)
        stepper.step.run_ahead([3], 0, segment, noise, 1.0)
        assert alone.num_asked == 0
        stepper.step.run_ahead([3], 0, segment, noise, 1.0, longest_s=1e9)
        assert alone.told == [(2, 0.5)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_teams_bits_are_those_of_one_thread(family: str, dtype: str) -> None:
    stepper = Stepper(build(family), dtype)
    prompt, text = tokens(70, 3), tokens(9, 4)
    found = {}
    for num_threads in (1, 2, 3, 5):
        stepper.step.use_threads(num_threads)
        cache = stepper.cache()
        logits = [stepper.run((cache, prompt)), stepper.run((cache, text)), stepper.run((cache, text[:1]))]
        found[num_threads] = torch.cat(logits), cache.keys.clone(), cache.num_columns
    for logits_, keys, num_columns in found.values():
        assert torch.equal(logits_, found[1][0])
        assert torch.equal(keys, found[1][1])
        assert num_columns == found[1][2] > 0


@pytest.mark.parametrize(
    ("seconds", "most", "expected"),
    [
        ({1: 0.010, 2: 0.006, 4: 0.004, 6: 0.0035}, 6, 4),  # six are barely better
        ({1: 0.010, 2: 0.0085, 4: 0.001}, 4, 1),
        ({1: 0.010, 2: 0.006}, 2, 2),
        ({1: 0.010}, 1, 1),
        ({1: 0.060}, 6, 6),  # a large model's steps are memory-bound: times no other size
    ],
)
def test_threads_are_doubled_as_long_as_steps_are_much_shorter(
    seconds: dict[int, float], most: int, expected: int
) -> None:
    step = Stepper(build("qwen2")).step
    assert step._best_team(seconds.__getitem__, most) == expected
