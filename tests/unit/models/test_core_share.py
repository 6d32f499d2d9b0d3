"""The cores are divided among the running computations, every item is done once, and threads can be kept apart."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from vidspec_models import core_share
from vidspec_models.core_share import CoreAvoidance, CoreShare, torch_threads

pytestmark = pytest.mark.unit


@pytest.fixture
def num_cores() -> int:
    return 4


@pytest.fixture
def cores(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreShare]:
    """A machine with `num_cores` cores, all of which torch may use."""
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    with torch_threads(num_cores):
        yield CoreShare()


def test_who_computes_alone_has_all_cores_and_others_an_equal_part(cores: CoreShare) -> None:
    seen = list[int]()
    with cores:
        seen.append(cores.num_threads)
        with cores:
            seen.append(cores.num_threads)
            with cores, cores, cores:
                seen.append(cores.num_threads)
        with pytest.raises(ValueError, match="wrong"), cores:
            raise ValueError("wrong")
        seen.append(cores.num_threads)
        with cores:
            seen.append(cores.num_threads)
    assert seen == [4, 2, 1, 4, 2]


def test_a_lent_core_is_missing_until_the_time_is_up_and_the_last_one_is_never_lent(
    cores: CoreShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(core_share, "time", SimpleNamespace(monotonic=lambda: now))
    cores.lend(0.25)
    assert cores.num_threads == 3
    with cores, cores:
        assert cores.num_threads == 1
        with cores, cores:
            assert cores.num_threads == 1
    now += 0.25
    assert cores.num_threads == 4


def test_torch_has_its_usual_threads_again_however_a_block_ends() -> None:
    usual = torch.get_num_threads()
    with torch_threads(usual + 1):
        assert torch.get_num_threads() == usual + 1
    assert torch.get_num_threads() == usual
    with pytest.raises(ValueError, match="wrong"), torch_threads(usual + 1):
        raise ValueError("wrong")
    assert torch.get_num_threads() == usual


@pytest.mark.parametrize("num_cores", [4, 40])
def test_everything_is_done_once_by_a_thread_a_core_the_calling_one_among_them(
    cores: CoreShare, num_cores: int
) -> None:
    together = threading.Barrier(num_cores)
    done, threads = Counter[int](), set[int]()

    def work(item: int) -> None:
        together.wait(10)  # passes only if `num_cores` threads are here at once
        done[item] += 1
        threads.add(threading.get_ident())

    cores.parallel_for(work, range(2 * num_cores))
    assert done == Counter(range(2 * num_cores))
    assert len(threads) == num_cores
    assert threading.get_ident() in threads


def test_beside_as_many_others_nobody_else_is_asked(cores: CoreShare) -> None:
    threads = set[int]()
    with cores, cores, cores, cores:
        cores.parallel_for(lambda _: threads.add(threading.get_ident()), range(8))
    assert threads == {threading.get_ident()}


def test_what_a_thread_raises_is_raised(cores: CoreShare) -> None:
    def work(item: int) -> None:
        threading.Event().wait(0.02)
        if item:
            raise ValueError(str(item))

    with pytest.raises(ValueError, match="1"):
        cores.parallel_for(work, range(2))


def test_helpers_that_others_keep_are_not_waited_for_once_nothing_is_left(cores: CoreShare) -> None:
    over, done = threading.Event(), list[int]()
    with ThreadPoolExecutor(1) as kept:
        cores._threads = kept
        others = kept.submit(over.wait, 10)
        cores.parallel_for(done.append, range(8))
        assert not others.done()
        over.set()
    assert done == list(range(8))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_keeps_off_the_core_of_its_waker_wherever_that_goes(sleeper: int) -> None:
    apart, mine = CoreAvoidance([sleeper]), os.sched_getaffinity(0)
    try:
        for core in [*mine, *mine]:
            os.sched_setaffinity(0, {core})  # go there ...
            os.sched_setaffinity(0, mine)  # ... and be free to leave
            apart.update()
            theirs = os.sched_getaffinity(sleeper)
            assert len(theirs) == len(mine) - 1
            assert theirs < mine
        os.sched_setaffinity(0, {core})
        apart.update()
        assert os.sched_getaffinity(sleeper) == theirs, "who has one core only leaves others where they are"
    finally:
        os.sched_setaffinity(0, mine)


def test_threads_that_may_not_be_moved_or_have_ended_are_no_error(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()

    def refuse(thread: int, cores: set[int]) -> None:
        tried.append(thread)
        raise ProcessLookupError if thread == 7 else PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 10**6})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    CoreAvoidance([7, sleeper]).update()
    assert tried == [7, sleeper]
