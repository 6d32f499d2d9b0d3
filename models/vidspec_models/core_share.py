"""CoreShare: what several threads of a worker may take of its cores while they compute beside each other.

A prompt's tower runs in a thread of its own, beside the loop that prefills another prompt or decodes. If each of them
took all cores, every product would wait for a thread that has none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class CoreShare:
    """Entered, as a context, by whoever computes; kernels ask for `num_threads` when they begin a part of a layer.

    Only for what gives the same bits whatever the number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_at_work = 0
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="cores")

    @property
    def num_threads(self) -> int:
        """As many as torch may use in this thread, parted among those at work."""
        return max(torch.get_num_threads() // max(self._num_at_work, 1), 1)

    def spread(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Every thread, the calling one among them, takes the next item as soon as it is free."""
        left = iter(items)

        def run() -> None:
            for item in left:
                work(item)

        others = [self._threads.submit(run) for _ in range(self.num_threads - 1)]
        run()
        for other in others:
            if not other.cancel():  # else it has not begun, and nothing is left for it
                other.result()

    def __enter__(self) -> None:
        with self._lock:
            self._num_at_work += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_at_work -= 1
