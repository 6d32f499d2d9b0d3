"""Admission: a place is taken before any work is done for a request, and shutting down begins at this door.

Life: open -> draining (nothing new, running requests go on) -> closing (running requests get an error).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from vidspec_service.api.problems import TooManyRequests
from vidspec_service.api.rate_limit import RateLimit
from vidspec_service.errors import CapacityError, Draining, QueueFull
from vidspec_service.telemetry import Metrics

_SHARE = 3


class Admission:
    """Counts the requests inside: `capacity` bounds uploads, decodes and queues together, `max_bytes` what their
    bodies hold on disk and in memory, `per_caller` and `rate` what one caller may take of both.

    Where there are `several_callers`, nobody fills the house: one may have as many places, and bytes beyond his first
    body's, as `_SHARE` times those that are free: alone three quarters, with another like him three sevenths each.
    """

    def __init__(
        self,
        capacity: int,
        max_bytes: int,
        metrics: Metrics,
        *,
        several_callers: bool = False,
        per_caller: int | None = None,
        rate: RateLimit,
    ) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._several_callers = several_callers
        self._per_caller = per_caller
        self._rate = rate
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.num_admitted = 0
        self.num_bytes = 0
        self.closing = asyncio.Event()  # set when running requests must end now

    @property
    def is_draining(self) -> bool:
        """True from the first signal on; readiness is red."""
        return self._is_draining

    @contextmanager
    def place(self, caller: str) -> Iterator[Place]:
        """Hold one place; raises Draining, QueueFull or TooManyRequests at once instead of waiting for one."""
        with self._counting_refusals():
            self._check(caller)
        self.num_admitted += 1
        self._inside[caller] += 1
        self._idle.clear()
        place = Place(self, caller)
        try:
            yield place
        finally:
            place.release_bytes()
            self.num_admitted -= 1
            self._inside[caller] -= 1
            self._inside += Counter()  # forget callers with nothing inside
            self._bytes += Counter()
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

    def change_bytes(self, caller: str, held: int, wanted: int) -> None:
        """For `Place`. Whoever is alone may have what the limits of a single body allow."""
        others, mine = self.num_bytes - held, self._bytes[caller] - held
        num_free = self._max_bytes - others - wanted
        with self._counting_refusals():
            if others > 0 and wanted > held and num_free < 0:
                raise QueueFull(f"All {self._max_bytes:,} bytes for uploads are taken (VIDSPEC_MAX_QUEUED_BYTES).")
            if self._several_callers and mine > 0 and wanted > held and mine + wanted > _SHARE * num_free:
                raise TooManyRequests(f"Your other uploads hold {mine:,} bytes; what is left is for other keys.")
        self.num_bytes = others + wanted
        self._bytes[caller] = mine + wanted

    def _check(self, caller: str) -> None:
        if self._is_draining:
            raise Draining("The server is shutting down; ask another one.")
        if self.num_admitted >= self._capacity:
            raise QueueFull(f"All {self._capacity} places are taken; try again.")
        if self._per_caller is not None and self._inside[caller] >= self._per_caller:
            raise TooManyRequests(
                f"You have {self._per_caller} requests under way already (VIDSPEC_MAX_REQUESTS_PER_KEY)."
            )
        num_free = self._capacity - self.num_admitted
        if self._several_callers and self._inside[caller] >= _SHARE * num_free:
            raise TooManyRequests(
                f"You have {self._inside[caller]} requests under way; the {num_free} places left are for other keys."
            )
        wait_s = self._rate.take(caller)
        if wait_s > 0:
            raise TooManyRequests(
                f"You may send {self._rate.per_minute} requests a minute (VIDSPEC_REQUESTS_PER_MINUTE_PER_KEY).",
                retry_after_s=wait_s,
            )

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except CapacityError as error:
            self._metrics.admission_rejected(error.code)
            raise


class Place:
    """One request's place, and the bytes of its body."""

    def __init__(self, admission: Admission, caller: str) -> None:
        self._admission = admission
        self._caller = caller
        self._num_bytes = 0

    def hold_bytes(self, total: int) -> None:
        """From now on the body holds `total` bytes, if that is more than before; raises QueueFull."""
        if total > self._num_bytes:
            self._admission.change_bytes(self._caller, self._num_bytes, total)
            self._num_bytes = total

    def release_bytes(self) -> None:
        """The body is gone; the request goes on."""
        self._admission.change_bytes(self._caller, self._num_bytes, 0)
        self._num_bytes = 0
