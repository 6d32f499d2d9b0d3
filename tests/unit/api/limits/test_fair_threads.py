"""FairThreads: no caller's work keeps that of others waiting, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event, current_thread

import pytest

from vidspec_service.api.limits.admission import FairThreads, share_key_var

PATIENCE_S = 20.0


class Works:
    """Submits work that notes whose it is and ends when it may."""

    def __init__(self) -> None:
        self.threads = FairThreads(2)
        self.begun: list[str] = []

    def wants(self, who: str, over: Event) -> tuple[Event, Future[None]]:
        """What tells that the work has begun, and its future."""
        begins = Event()

        def work() -> None:
            self.begun.append(who)
            begins.set()
            over.wait(PATIENCE_S)

        share_key_var.set(who)
        return begins, self.threads.submit(work)


@pytest.fixture
def works() -> Iterator[Works]:
    """Of two threads, so each caller may have one."""
    works = Works()
    with works.threads:
        yield works


def test_work_of_another_begins_whatever_one_has_asked_for(works: Works) -> None:
    over = Event()
    greedy = [works.wants("greedy", over) for _ in range(10)]
    begins, _ = works.wants("other", over)
    is_begun = begins.wait(PATIENCE_S)
    over.set()
    assert is_begun
    for _, future in greedy:
        future.result(PATIENCE_S)


def test_nobody_has_more_than_half_of_the_threads(works: Works) -> None:
    over = Event()
    first, second = works.wants("a", over), works.wants("a", over)
    assert first[0].wait(PATIENCE_S)
    assert works.wants("b", over)[0].wait(PATIENCE_S)
    assert works.begun == ["a", "b"]
    over.set()
    second[1].result(PATIENCE_S)


def test_those_who_wait_are_served_in_rotation(works: Works) -> None:
    never, first, rest = Event(), Event(), Event()
    for who, over in (("a", never), ("b", first)):  # both threads
        assert works.wants(who, over)[0].wait(PATIENCE_S)
    waiting = [works.wants(who, rest)[1] for who in "ccccdde"]
    rest.set()
    first.set()
    for future in waiting:
        future.result(PATIENCE_S)
    assert works.begun == [*"abcdecdcc"]
    never.set()


def test_what_work_returns_or_raises_is_what_its_future_has(works: Works) -> None:
    assert works.threads.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        works.threads.submit(divmod, 7, 0).result(PATIENCE_S)
    name = works.threads.submit(lambda: current_thread().name).result(PATIENCE_S)
    assert name != current_thread().name


def test_work_that_is_given_up_while_it_waits_never_begins(works: Works) -> None:
    over = Event()
    begins, _ = works.wants("a", over)
    assert begins.wait(PATIENCE_S)
    _, given_up = works.wants("a", over)
    _, last = works.wants("a", over)
    assert given_up.cancel()
    over.set()
    last.result(PATIENCE_S)
    assert works.begun == ["a", "a"]


def test_what_has_ended_is_forgotten(works: Works) -> None:
    over = Event()
    over.set()
    for who in "abc":
        works.wants(who, over)[1].result(PATIENCE_S)
    works.threads.shutdown()
    assert not works.threads._running
    assert not works.threads._waiting
