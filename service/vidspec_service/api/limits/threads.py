"""Threads for what would hold up the event loop, such as checking a large body; callers take turns at them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

share_key_var: ContextVar[str] = ContextVar("share_key", default="")
"""Against whose share a request counts; set once it has its permit."""


class FairThreads(ThreadPoolExecutor):
    """In place of an event loop's own threads, where sixty bodies of one caller had all others wait for half a minute.

    Nobody has more than half of the threads at a time, and those who wait are served in rotation.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._most = num_threads // 2
        self._lock = Lock()
        self._running: Counter[str] = Counter()
        # In the order in which they are served.
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As in any executor; a thread may then begin with the work of somebody else."""
        future: Future[Any] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(share_key_var.get(), deque())
            waiting.append((future, partial(fn, *args, **kwargs)))
        super().submit(self._work)
        return future

    def _work(self) -> None:
        """Work until nobody waits who may have one more thread: who may not has one that goes on with it."""
        while (turn := self._next()) is not None:
            who, future, work = turn
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._running -= Counter({who: 1})

    def _next(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            who = next((each for each in self._waiting if self._running[each] < self._most), None)
            if who is None:
                return None
            waiting = self._waiting.pop(who)
            future, work = waiting.popleft()
            if waiting:
                self._waiting[who] = waiting
            self._running[who] += 1
            return who, future, work
