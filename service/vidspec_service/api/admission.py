"""Admission: a slot is taken before any work is done for a request, and shutting down begins at this door.

Life: open -> draining (nothing new, running requests go on) -> closing (running requests get an error).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from vidspec_service.errors import CapacityError, Draining, QueueFull
from vidspec_service.telemetry import Metrics


class Admission:
    """Counts the requests inside; at most `capacity`, which bounds uploads, decodes and queues together."""

    def __init__(self, capacity: int, metrics: Metrics) -> None:
        self._capacity = capacity
        self._metrics = metrics
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_admitted = 0
        self.closing = asyncio.Event()  # set when running requests must end now

    @property
    def is_draining(self) -> bool:
        """True from the first signal on; readiness is red."""
        return self._is_draining

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place; raises Draining or QueueFull at once instead of waiting for one."""
        try:
            self._check()
        except CapacityError as error:
            self._metrics.admission_rejected(error.code)
            raise
        self.num_admitted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_admitted -= 1
            if self.num_admitted == 0:
                self._idle.set()

    def start_draining(self) -> None:
        """Admit nothing new."""
        self._is_draining = True

    def close(self) -> None:
        """End the requests that still run; each client gets an error."""
        self._is_draining = True
        self.closing.set()

    async def wait_idle(self) -> None:
        """Return when no request is inside."""
        await self._idle.wait()

    def _check(self) -> None:
        if self._is_draining:
            raise Draining("The server is shutting down; ask another one.")
        if self.num_admitted >= self._capacity:
            raise QueueFull(f"All {self._capacity} places are taken; try again.")
