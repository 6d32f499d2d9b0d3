"""How threads share the cores: CoreShare divides them between threads that compute at the same time, CoreAvoidance
keeps threads off a busy one, `torch_threads` sets torch's number.

A prompt's vision tower runs in its own thread, in parallel to the loop that prefills another prompt or decodes. If each
of the two used all cores, every product would wait for a thread without a core.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

T = TypeVar("T")
_libc = ctypes.CDLL(None)


class CoreShare:
    """A context manager entered by each computing thread; kernels ask how many threads they may use.

    Only for computations whose bits do not depend on the number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_at_work = 0
        self._lent_until = -math.inf
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="cores")

    @property
    def num_threads(self) -> int:
        """`most_threads` less a lent core."""
        return max(self.most_threads - (self.lent_s > 0), 1)

    @property
    def most_threads(self) -> int:
        """Torch's number of threads in this thread, divided by the number of computing threads."""
        return max(torch.get_num_threads() // max(self._num_at_work, 1), 1)

    @property
    def lent_s(self) -> float:
        """Seconds until a lent core is free again."""
        return max(self._lent_until - time.monotonic(), 0.0)

    def lend(self, seconds: float) -> None:
        """Leave a core to another process from now on for so long.

        Two threads that compute on one core stop each other for milliseconds, and all that wait for one of them.
        """
        self._lent_until = time.monotonic() + seconds

    def parallel_for(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Process the items in `num_threads` threads, including the calling one; each takes the next item when free."""
        left = iter(items)

        def run() -> None:
            for item in left:
                work(item)

        others = [self._threads.submit(run) for _ in range(self.num_threads - 1)]
        run()
        for other in others:
            if not other.cancel():  # if cancelled, the thread had not started, and no item is left
                other.result()

    def __enter__(self) -> None:
        with self._lock:
            self._num_at_work += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_at_work -= 1


class CoreAvoidance:
    """Keeps threads off the core of a thread that wakes them and works on.

    If all cores were busy a moment ago, Linux may wake a thread on its waker's core although another core is idle, and
    leave both there for milliseconds.
    """

    def __init__(self, threads: Sequence[int]) -> None:
        """`threads` are native ids, also of other processes; a process's id means its main thread."""
        self._threads = threads
        self._allowed = set[int]()

    def update(self) -> None:
        """Allow the threads all cores of the calling thread but the one it runs on now. Call it often."""
        cores = os.sched_getaffinity(0) - {_libc.sched_getcpu()}
        if cores and cores != self._allowed:
            self._allowed = cores
            for thread in self._threads:
                with suppress(OSError):  # a sandbox may forbid it, or the thread may have ended
                    os.sched_setaffinity(thread, cores)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Inside, torch uses `num_threads` threads. Leaving out cores that other processes keep busy is faster: a product
    waits for its slowest thread, and a small product does little else.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
