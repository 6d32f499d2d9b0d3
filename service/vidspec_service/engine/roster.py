"""Roster: where every request of the target is, and whose keys and values there is room for.

waiting → preparing → prefilling → decoding, and paused when room runs out: the youngest gives way, keeps its
committed tokens, and is prefilled again, first of all, once there is room. Nothing is ever dropped.
"""

from __future__ import annotations

from collections import deque

from vidspec_models.kv_cache import KVPool
from vidspec_service.engine.payload import close_payload
from vidspec_service.engine.prefixes import Prefixes
from vidspec_service.engine.preparing import Waiting
from vidspec_service.engine.running import Running

_MOST_PREPARING = 2  # one in the tower, the next one ready for it


class Roster:
    """Plain bookkeeping; the loop does the work."""

    def __init__(self, pool: KVPool, max_running: int, prefill_chunk: int) -> None:
        self._pool = pool
        self._prefixes = Prefixes(pool, prefill_chunk)
        self._max_running = max_running
        self._num_entered = 0
        self.waiting: deque[Waiting] = deque()
        self._preparing: set[str] = set()
        self.paused: deque[Running] = deque()
        self.prefilling: deque[Running] = deque()
        self.decoding: dict[str, Running] = {}

    @property
    def entered(self) -> list[Running]:
        """Everyone who is prepared, wherever they stand."""
        return [*self.decoding.values(), *self.prefilling, *self.paused]

    @property
    def num_active(self) -> int:
        """Requests that hold a place, paused ones included."""
        return len(self._preparing) + len(self.prefilling) + len(self.decoding) + len(self.paused)

    @property
    def num_unfinished(self) -> int:
        """Every request that is here, wherever it stands."""
        return len(self.waiting) + self.num_active

    @property
    def can_compute(self) -> bool:
        """There is a forward to make now."""
        return bool(self.prefilling or self.decoding or self.paused)

    @property
    def can_admit(self) -> bool:
        """Somebody waits, there is a place, and nobody has an older claim."""
        is_full = self.num_active >= self._max_running or len(self._preparing) >= _MOST_PREPARING
        return bool(self.waiting) and not self.paused and not is_full

    def next_waiting(self) -> Waiting | None:
        """The oldest waiting request, if it can be admitted."""
        if not self.can_admit:
            return None
        waiting = self.waiting.popleft()
        self._preparing.add(waiting.request.request_id)
        return waiting

    def is_wanted(self, request_id: str) -> bool:
        """Its preparation has ended; False if it was cancelled meanwhile."""
        is_there = request_id in self._preparing
        self._preparing.discard(request_id)
        return is_there

    def enter(self, running: Running) -> int:
        """Prepared: it wants to be prefilled. Returns how many of its rows an earlier prompt has left here."""
        self._num_entered += 1
        running.ticket = self._num_entered
        self.prefilling.append(running)
        return self._prefixes.begin(running.prompt, running.cache)

    def next_prefill(self) -> Running | None:
        """The oldest request to prefill; one that was paused goes first."""
        while self.paused:
            if self._pool.fits(self.paused[0].num_rows_to_resume):
                self.prefilling.appendleft(self.paused.popleft())
                break
            if not self._prefixes.give_back():
                break
        return self.prefilling[0] if self.prefilling else None

    def begin_decoding(self, running: Running) -> None:
        """Its prompt is in the cache."""
        self.prefilling.remove(running)
        self.decoding[running.request_id] = running

    def secure(self, running: Running, num_rows: int) -> bool:
        """Room for `num_rows` more rows of a request, at the cost of younger ones; False if it was itself paused."""
        while not self._pool.grow(running.cache, running.cache.length + num_rows):
            if self._prefixes.give_back():
                continue
            youngest = max([*self.prefilling, *self.decoding.values()], key=lambda other: other.ticket)
            self._pause(youngest)
            if youngest is running:
                return False
        return True

    def finish(self, request_id: str) -> None:
        """It has ended: its place is free, and its room, but for what a question about the same video can use."""
        running = self.decoding.pop(request_id)
        self._prefixes.keep(running.prompt, running.cache)

    def cancel(self, request_id: str) -> None:
        """Forget a request, wherever it is."""
        self._preparing.discard(request_id)
        running = self.decoding.pop(request_id, None)
        for queue in (self.prefilling, self.paused):
            for item in [item for item in queue if item.request_id == request_id]:
                queue.remove(item)
                running = item
        if running is not None:
            self._pool.release(running.cache)
        for waiting in [item for item in self.waiting if item.request.request_id == request_id]:
            self.waiting.remove(waiting)
            close_payload(waiting.payload)

    def _pause(self, running: Running) -> None:
        if self.decoding.pop(running.request_id, None) is None:
            self.prefilling.remove(running)
        self._pool.release(running.cache)
        self.paused.append(running)
        self.paused = deque(sorted(self.paused, key=lambda other: other.ticket))
