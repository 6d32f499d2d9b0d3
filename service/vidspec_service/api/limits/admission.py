"""Who may have how much at a time: Admission gives permits, FairQueue slots to decode in, FairThreads threads.

A request needs a permit before any work is done for it. No caller keeps all others waiting (ADR 20).

States: open -> draining (nothing new, running requests go on) -> closing (running requests get an error).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

from starlette.requests import Request

from vidspec_service.api.errors import TooManyRequests
from vidspec_service.api.limits.callers import RateLimit
from vidspec_service.errors import CapacityError, Draining, QueueFull
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

_SHARE = 3  # a caller may have this many times as many places, slots or bytes as are free
ANYONE = ""  # the caller of every request when no API keys are set
share_key_var: ContextVar[str] = ContextVar("share_key", default=ANYONE)
"""Against whose share a request counts; set once it has its permit."""


def caller_of(request: Request) -> str:
    """Who asks: the name of an API key, or ANYONE."""
    caller: str = getattr(request.state, "caller", ANYONE)
    return caller


class Admission:
    """Counts the answers that admitted requests ask for, mostly one each, and the bytes that their bodies hold.

    The settings bound both: for all that uploads, decodes and waits, and for each caller. With `are_several` callers
    none can take everything: beyond its first request, and the answers that are generated at a time, one may have at
    most `_SHARE` times as many places as are free, and likewise bytes. So one busy caller gets three quarters, and two
    get three sevenths each.
    """

    def __init__(self, settings: Settings, metrics: Metrics, *, are_several: bool) -> None:
        self._most_running = settings.max_running_requests
        self._capacity = self._most_running + settings.max_queued_requests
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
    def max_places(self) -> int:
        """Answers that a single request may ask for."""
        most = max(self._most_running, _SHARE * self._capacity // (_SHARE + 1)) if self._are_several else self._capacity
        return most if self._max_requests is None else min(most, self._max_requests)

    @property
    def num_admitted(self) -> int:
        """Answers that all admitted requests ask for."""
        return sum(permit.num_places for permit in self._inside)

    @property
    def num_outside_engine(self) -> int:
        """Answers that requests ask for which have not been handed to the engine yet."""
        return sum(permit.num_places - permit.num_in_engine for permit in self._inside)

    @property
    def num_bytes(self) -> int:
        """Bytes that the bodies of all admitted requests hold."""
        return sum(permit.num_bytes for permit in self._inside)

    @contextmanager
    def permit(self, caller: str, share_key: str) -> Iterator[Permit]:
        """Hold one permit; raises Draining, QueueFull or TooManyRequests at once instead of waiting for one.

        It counts against the share of `share_key`.
        """
        if self.is_draining:
            raise self._counted(Draining("The server is shutting down; try another one."))
        permit = Permit(self, caller, share_key)
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
        """End the requests that still run, after `start_draining`; each client gets an error."""
        self.closing.set()

    def check_places(self, permit: Permit, wanted: int) -> None:
        """For `Permit`: raises QueueFull or TooManyRequests unless its share allows `wanted` more places."""
        num_free = self._capacity - self.num_admitted
        if num_free < wanted:
            taken = f"{self.num_admitted} of {self._capacity}"
            raise self._counted(QueueFull(f"{taken} places for requests are taken; try again."))
        # From here on, check the last wanted place as if the others were taken already.
        of_same_share = [each for each in self._inside if each.share_key == permit.share_key]
        mine = sum(each.num_places for each in of_same_share) + wanted - 1
        is_first = all(each is permit for each in of_same_share)
        num_free -= wanted - 1
        if self._max_requests is not None and mine >= self._max_requests:
            most = f"{self._max_requests} requests under way at a time (VIDSPEC_MAX_REQUESTS_PER_KEY)"
            raise self._counted(TooManyRequests(f"You may have {most}."))
        is_exempt = is_first and mine < self._most_running
        if self._are_several and not is_exempt and mine >= _SHARE * num_free:
            left = f"the {num_free} free places are for other callers"
            raise self._counted(TooManyRequests(f"You would have {mine + 1} requests under way; {left}."))

    def check_bytes(self, share_key: str, wanted: int) -> None:
        """For `Permit`, while it holds none: raises QueueFull or TooManyRequests unless it may hold `wanted` bytes.

        A request that is alone in the server may have what the limits of a single body allow.
        """
        mine = sum(each.num_bytes for each in self._inside if each.share_key == share_key)
        num_free = self._max_bytes - self.num_bytes - wanted
        if self.num_bytes > 0 and num_free < 0:
            all_taken = (
                f"Other uploads leave no room in {self._max_bytes:,} bytes (VIDSPEC_MAX_QUEUED_BYTES); try again."
            )
            raise self._counted(QueueFull(all_taken))
        if self._are_several and mine > 0 and mine + wanted > _SHARE * num_free:
            left = f"Your other uploads hold {mine:,} bytes; the rest is for other callers."
            raise self._counted(TooManyRequests(left))

    def _counted(self, error: CapacityError) -> CapacityError:
        self._metrics.admission_rejections.labels(error.code).inc()
        return error


class Permit:
    """One admitted request: the places that its answers take, and the bytes that its body holds."""

    def __init__(self, admission: Admission, caller: str, share_key: str) -> None:
        self.caller = caller
        self.share_key = share_key
        self.closing = admission.closing
        self._admission = admission
        self.num_bytes = 0
        self.num_places = 1
        self.num_in_engine = 0  # answers handed over: the engine tells which of them wait, run or have ended

    def hold_places(self, total: int) -> None:
        """Take places for `total` answers, if that is more than before; raises QueueFull or TooManyRequests."""
        if total > self.num_places:
            self._admission.check_places(self, total - self.num_places)
            self.num_places = total

    def hold_bytes(self, total: int) -> None:
        """Hold `total` bytes instead of those before; raises QueueFull or TooManyRequests.

        A refused request holds no bytes any more: otherwise all bodies that grow at the same time would be refused.
        """
        self.num_bytes = 0
        self._admission.check_bytes(self.share_key, total)
        self.num_bytes = total


class FairQueue:
    """Hands out at most `limit` slots; each waiting caller's first request is served before any caller's second.

    A request that wants several slots (never more than `limit`) waits until all are free; no other overtakes it.
    With `are_shared`, no caller takes all of four slots or more: one may have three times as many as are free, so that
    a new caller finds a slot without waiting for another's answer. With `most`, no caller takes more than that. The
    number of waiting requests is not bounded here: each has a permit, which `Admission` counts, and a deadline.
    """

    def __init__(self, limit: int, *, are_shared: bool = False, most: float = math.inf) -> None:
        self._num_free = limit
        self._are_shared = are_shared
        self._most = most
        self._taken: Counter[str] = Counter()
        # Callers in the order they are served; each request with the number of slots that it wants.
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()

    async def acquire(self, caller: str, num: int = 1) -> None:
        """Wait for `num` slots. Call `release` once, with the same `num`, after every `acquire` that returns."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((mine, num))
        self._serve()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._serve()  # the requests behind it may want fewer
            else:
                self.release(caller, num)  # the slots were granted, but nobody is left to use them
            raise

    def release(self, caller: str, num: int = 1) -> None:
        """Hand the slots to the next in rotation; they stay free if no waiting caller may have them."""
        self._num_free += num
        self._taken -= Counter({caller: num})
        self._serve()

    def _serve(self) -> None:
        """Grant slots in rotation, skipping cancelled requests and callers that have their share."""
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
        most = min(self._most, _SHARE * self._num_free) if self._are_shared else self._most
        return taken > 0 and taken + num > most


class FairThreads(ThreadPoolExecutor):
    """Threads for what would hold up the event loop, such as checking a large body.

    In an event loop's own threads, sixty bodies of one caller had all others wait for half a minute.

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
