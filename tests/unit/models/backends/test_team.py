"""Threads that make one step together: the bits of a single one, however many there are and wherever they wait."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
from vidspec_models.backends.cpu.layers import compiled
from vidspec_models.backends.cpu.packing import Array
from vidspec_models.backends.cpu.team import Member, Team, meet, now_ns, share

pytestmark = pytest.mark.unit


@given(total=st.integers(0, 50), team_size=st.integers(1, 12))
def test_all_is_shared_out_once_and_fairly(total: int, team_size: int) -> None:
    parts = [share(Member(number, team_size, 0), total) for number in range(team_size)]
    assert [each for begin, end in parts for each in range(begin, end)] == list(range(total))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1


@compiled
def sum_of_all(member: Member, rounds: int, own: Array, sums: Array) -> None:
    """Each round every member writes its number, then reads what all have written, then lets others write again."""
    for i in range(rounds):
        own[member.number] = i + member.number
        meet(member)
        total = 0
        for other in range(member.team_size):
            total += own[other]
        sums[member.number, i] = total
        meet(member)


@pytest.mark.parametrize("team_size", [1, 2, 3, 7])
def test_nobody_goes_on_before_all_have_come(team_size: int) -> None:
    """Seven on two cores, too: who waits gives way."""
    rounds, meeting = 300, np.zeros(8, np.int64)
    own, sums = np.zeros(team_size, np.int64), np.zeros((team_size, rounds), np.int64)
    with ThreadPoolExecutor(team_size) as threads:
        for done in [
            threads.submit(sum_of_all, Member(number, team_size, meeting.ctypes.data), rounds, own, sums)
            for number in range(team_size)
        ]:
            done.result(timeout=60)
    expected = team_size * np.arange(rounds) + sum(range(team_size))
    assert (sums == expected).all()


@compiled
def kernels_clock() -> int:
    return int(now_ns())


def test_kernels_know_the_time() -> None:
    before = time.monotonic_ns()
    assert before <= kernels_clock() <= time.monotonic_ns()


def test_nobody_waits_for_ever_for_one_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_PATIENCE", 10_000)
    impatient, meeting = numba.njit(meet.py_func), np.zeros(8, np.int64)
    with pytest.raises(RuntimeError, match="missing"):
        impatient(Member(0, 2, meeting.ctypes.data))


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
    together.run(1, lambda member: None)
    assert all(os.sched_getaffinity(thread) == cores for thread in together._ids)
    together.run(3, lambda member: None)
    assert all(len(os.sched_getaffinity(thread)) == len(cores) - 1 for thread in together._ids)
    assert os.sched_getaffinity(0) == cores


def test_a_team_works_where_nobody_may_choose_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    done: list[int] = []
    Team(2).run(2, lambda member: done.append(member.number))
    assert sorted(done) == [0, 1]


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
        ({1: 0.010, 2: 0.006, 4: 0.004, 6: 0.0035}, 6, 4),  # six are hardly better
        ({1: 0.010, 2: 0.0085, 4: 0.001}, 4, 1),
        ({1: 0.010, 2: 0.006}, 2, 2),
        ({1: 0.010}, 1, 1),
        ({1: 0.060}, 6, 6),  # a large model's steps are all memory: nothing more is timed
    ],
)
def test_threads_are_doubled_as_long_as_steps_are_much_shorter(
    seconds: dict[int, float], most: int, expected: int
) -> None:
    step = Stepper(build("qwen2")).step
    assert step._best_team(seconds.__getitem__, most) == expected
