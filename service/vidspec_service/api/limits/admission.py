"""Admission: a request needs a permit before any work is done for it; then FairQueue says when it is decoded.

Life: open -> draining (nothing new, running requests go on) -> closing (running requests get an error).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from vidspec_service.api.errors import TooManyRequests
from vidspec_service.api.limits.callers import RateLimit
from vidspec_service.errors import CapacityError, Draining, QueueFull
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

_SHARE = 3
ANYONE = ""  # the caller where no keys are asked for


def caller_of(request: Request) -> str:
    """Who asks: the name of a key, or ANYONE."""
    caller: str = getattr(request.state, "caller", ANYONE)
    return caller


def sharer_of(request: Request) -> str:
    """Whose share of the places a request takes: its key's, or where no keys are asked for its address's."""
    return caller_of(request) or (request.client.host if request.client is not None else ANYONE)


class Admission:
    """Counts the answers that requests inside ask for, one for most, and the bytes that their bodies hold.

    The settings bound both: what uploads, decodes and waits together, and what one caller has of it. With `are_several`
    callers none takes everything: one may have as many permits, and bytes beyond its first body's, as `_SHARE` times
    those that are free: alone three quarters, with another like it three sevenths each.
    """

    def __init__(self, settings: Settings, metrics: Metrics, *, are_several: bool) -> None:
        self._capacity = settings.max_running_requests + settings.max_queued_requests
        self._max_bytes = settings.max_queued_bytes
        self._max_requests = settings.max_requests_per_key
        per_minute = settings.requests_per_minute_per_key
        self._rate = None if per_minute is None else RateLimit(per_minute, time.monotonic)
        self._are_several = are_several
        self._metrics = metrics
        self.is_draining = False  # True from the first signal on; readiness is red
        self.idle = asyncio.Event()  # set while no request is inside
        self.idle.set()
        self._inside: set[Permit] = set()
        self.closing = asyncio.Event()  # set when running requests must end now

    @property
    def num_admitted(self) -> int:
        """Answers that the requests inside ask for."""
        return sum(permit.num_places for permit in self._inside)

    @property
    def num_bytes(self) -> int:
        """Of all their bodies."""
        return sum(permit.num_bytes for permit in self._inside)

    @contextmanager
    def permit(self, caller: str, sharer: str | None = None) -> Iterator[Permit]:
        """Hold one permit; raises Draining, QueueFull or TooManyRequests at once instead of waiting for one.

        It is of the share of `sharer`; None: of the caller's.
        """
        if self.is_draining:
            raise self._counted(Draining("The server is shutting down; ask another one."))
        permit = Permit(self, caller, caller if sharer is None else sharer)
        self.check_places(permit, 1)
        if self._rate is not None and (wait_s := self._rate.take(caller)) > 0:
            allowed = f"{self._rate.per_minute} requests a minute (VIDSPEC_REQUESTS_PER_MINUTE_PER_KEY)"
            raise self._counted(TooManyRequests(f"You may send {allowed}.", retry_after_s=wait_s))
        self._inside.add(permit)
        self.idle.clear()
        try:
            yield permit
        finally:
            self._inside.remove(permit)
            if not self._inside:
                self.idle.set()

    def start_draining(self) -> None:
        """Admit nothing new."""
        self.is_draining = True

    def close(self) -> None:
        """End the requests that still run; each client gets an error."""
        self.is_draining = True
        self.closing.set()

    def check_places(self, permit: Permit, wanted: int) -> None:
        """For `Permit`: raises QueueFull or TooManyRequests unless its sharer may have so many more."""
        num_free = self._capacity - self.num_admitted
        if num_free < wanted:
            taken = f"{self.num_admitted} of " if num_free else "All "
            raise self._counted(QueueFull(f"{taken}{self._capacity} places are taken; try again."))
        # The last of those wanted is judged, with the others taken already.
        mine = sum(each.num_places for each in self._inside if each.sharer == permit.sharer) + wanted - 1
        num_free -= wanted - 1
        if self._max_requests is not None and mine >= self._max_requests:
            most = f"{self._max_requests} requests under way already (VIDSPEC_MAX_REQUESTS_PER_KEY)"
            raise self._counted(TooManyRequests(f"You have {most}."))
        if self._are_several and mine >= _SHARE * num_free:
            left = f"the {num_free} places left are for others"
            raise self._counted(TooManyRequests(f"You have {mine} requests under way; {left}."))

    def check_bytes(self, permit: Permit, wanted: int) -> None:
        """For `Permit`: likewise. Whoever is alone may have what the limits of a single body allow."""
        others = self.num_bytes - permit.num_bytes
        mine = sum(each.num_bytes for each in self._inside if each.sharer == permit.sharer) - permit.num_bytes
        num_free = self._max_bytes - others - wanted
        if others > 0 and num_free < 0:
            all_taken = f"All {self._max_bytes:,} bytes for uploads are taken (VIDSPEC_MAX_QUEUED_BYTES)."
            raise self._counted(QueueFull(all_taken))
        if self._are_several and mine > 0 and mine + wanted > _SHARE * num_free:
            left = f"Your other uploads hold {mine:,} bytes; what is left is for others."
            raise self._counted(TooManyRequests(left))

    def _counted(self, error: CapacityError) -> CapacityError:
        self._metrics.admission_rejections.labels(error.code).inc()
        return error


class Permit:
    """One request's right to be inside, with so many answers, and the bytes of its body."""

    def __init__(self, admission: Admission, caller: str, sharer: str) -> None:
        self.caller = caller
        self.sharer = sharer
        self.closing = admission.closing
        self._admission = admission
        self.num_bytes = 0
        self.num_places = 1

    def hold_places(self, total: int) -> None:
        """From now on it asks for `total` answers, if that is more than before; raises QueueFull or TooManyRequests."""
        if total > self.num_places:
            self._admission.check_places(self, total - self.num_places)
            self.num_places = total

    def hold_bytes(self, total: int) -> None:
        """From now on the body holds `total` bytes, if that is more than before; raises QueueFull or TooManyRequests.

        Who is refused holds nothing from then on: else all that grow side by side would be, one after the other.
        """
        if total > self.num_bytes:
            try:
                self._admission.check_bytes(self, total)
            except CapacityError:
                self.num_bytes = 0
                raise
            self.num_bytes = total


class FairQueue:
    """At most `limit` slots are taken. Of those who wait, each caller's first is served before anyone's second. Who
    wants several, of which there are never so many, waits until they are all there, and nobody passes.

    With `are_shared`, none takes all of them: as of the permits, one may have thrice as many as are free, so that who
    comes alone finds a slot, and waits for nobody's answer. Waiting has no bound of its own: whoever waits has a
    permit, which `Admission` counts, and a deadline.
    """

    def __init__(self, limit: int, *, are_shared: bool = False) -> None:
        self._num_free = limit
        self._are_shared = are_shared
        self._taken: Counter[str] = Counter()
        # In the order they are served; each with the slots that it wants.
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def acquire(self, caller: str, num: int = 1) -> None:
        """Wait for `num` slots; every `acquire` that returns is followed by one `release` of as many."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((mine, num))
        self._serve()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._serve()  # those behind may want fewer
            else:
                self.release(caller, num)  # they came, and nobody is left to use them
            raise

    def release(self, caller: str, num: int = 1) -> None:
        """Hand the slots to the next in rotation; they are free if nobody waits who may have them."""
        self._num_free += num
        self._taken -= Counter({caller: num})
        self._serve()

    def _serve(self) -> None:
        """Give out slots in rotation: past those who have left, and callers who have their share."""
        turns = deque(self._waiting)
        while turns:
            caller = turns.popleft()
            queue = self._waiting[caller]
            while queue and queue[0][0].done():
                queue.popleft()
            if queue and not self._has_its_share(caller, queue[0][1]):
                mine, num = queue[0]
                if num > self._num_free:
                    return
                queue.popleft()
                self._num_free -= num
                self._taken[caller] += num
                mine.set_result(None)
                if queue:
                    self._waiting.move_to_end(caller)
                    turns.append(caller)
            if not queue:
                del self._waiting[caller]

    def _has_its_share(self, caller: str, num: int) -> bool:
        taken = self._taken[caller]
        return self._are_shared and taken > 0 and taken + num > _SHARE * self._num_free
