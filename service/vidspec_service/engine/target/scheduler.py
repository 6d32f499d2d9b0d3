"""Scheduler: where every request of the target is, and whose keys and values there is room for.

waiting → preparing → prefilling → decoding, and preempted when room runs out: the youngest gives way, keeps its
committed tokens, and is prefilled again, first of all, once there is room. Nothing is ever dropped.
"""

from __future__ import annotations

from collections import deque

from vidspec_models.decoder.kv_cache import KVPool
from vidspec_service.engine.target.prefix_cache import PrefixCache
from vidspec_service.engine.target.request import TargetRequest
from vidspec_service.engine.worker.input_processor import Input

_MOST_PREPARING = 2  # one in the tower, the next one ready for it


class Scheduler:
    """Plain bookkeeping; the loop does the work."""

    def __init__(self, pool: KVPool, max_running: int, prefill_chunk: int) -> None:
        self._pool = pool
        self._prefixes = PrefixCache(pool, prefill_chunk)
        self._max_running = max_running
        self._num_added = 0
        self.waiting: deque[Input] = deque()
        self._preparing: set[str] = set()
        self.preempted: deque[TargetRequest] = deque()
        self.prefilling: deque[TargetRequest] = deque()
        self.decoding: dict[str, TargetRequest] = {}

    @property
    def entered(self) -> list[TargetRequest]:
        """Everyone who is prepared, wherever they stand."""
        return [*self.decoding.values(), *self.prefilling, *self.preempted]

    @property
    def num_active(self) -> int:
        """Requests that hold a place, preempted ones included."""
        return len(self._preparing) + len(self.prefilling) + len(self.decoding) + len(self.preempted)

    @property
    def num_unfinished(self) -> int:
        """Every request that is here, wherever it stands."""
        return len(self.waiting) + self.num_active

    @property
    def can_compute(self) -> bool:
        """There is a forward to make now."""
        return bool(self.prefilling or self.decoding or self.preempted)

    @property
    def can_admit(self) -> bool:
        """Somebody waits, there is a place, and nobody has an older claim."""
        is_full = self.num_active >= self._max_running or len(self._preparing) >= _MOST_PREPARING
        return bool(self.waiting) and not self.preempted and not is_full

    def begin_preparing(self) -> Input | None:
        """Take the oldest waiting request, if it can be admitted."""
        if not self.can_admit:
            return None
        item = self.waiting.popleft()
        self._preparing.add(item.request_id)
        return item

    def end_preparing(self, request_id: str) -> bool:
        """Its prompt is there; False if it was cancelled meanwhile."""
        is_wanted = request_id in self._preparing
        self._preparing.discard(request_id)
        return is_wanted

    def add(self, request: TargetRequest) -> int:
        """Prepared: it wants to be prefilled. Returns how many of its rows an earlier prompt has left here."""
        self._num_added += 1
        request.ticket = self._num_added
        self.prefilling.append(request)
        return self._prefixes.begin(request.prompt, request.cache)

    def next_prefill(self) -> TargetRequest | None:
        """The oldest request to prefill; one that was preempted goes first, once there is room for all of it."""
        while self.preempted:
            if self._pool.fits(self.preempted[0].num_rows_to_resume):
                self.prefilling.appendleft(self.preempted.popleft())
                break
            if not self._prefixes.evict():
                break
        return self.prefilling[0] if self.prefilling else None

    def begin_decoding(self, request: TargetRequest) -> None:
        """Its prompt is in the cache."""
        self.prefilling.remove(request)
        self.decoding[request.request_id] = request

    def allocate(self, request: TargetRequest, num_rows: int) -> bool:
        """Room for more rows of a request, at the cost of younger ones; False if it was itself preempted."""
        while not self._pool.grow(request.cache, request.cache.length + num_rows):
            if self._prefixes.evict():
                continue
            youngest = max([*self.prefilling, *self.decoding.values()], key=lambda other: other.ticket)
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def finish(self, request_id: str) -> None:
        """It has ended: its place is free, and its room, but for what a question about the same video can use."""
        request = self.decoding.pop(request_id)
        self._prefixes.keep(request.prompt, request.cache)

    def cancel(self, request_id: str) -> None:
        """Forget a request, wherever it is."""
        self._preparing.discard(request_id)
        request = self.decoding.pop(request_id, None)
        for queue in (self.prefilling, self.preempted):
            for item in [item for item in queue if item.request_id == request_id]:
                queue.remove(item)
                request = item
        if request is not None:
            self._pool.release(request.cache)
        self.waiting = deque(item for item in self.waiting if item.request_id != request_id)

    def _preempt(self, request: TargetRequest) -> None:
        if self.decoding.pop(request.request_id, None) is None:
            self.prefilling.remove(request)
        self._pool.release(request.cache)
        self.preempted = deque(sorted([*self.preempted, request], key=lambda other: other.ticket))
