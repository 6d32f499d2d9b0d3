"""DecodePool: decodes videos in confined children, one clip each, without blocking the event loop.

Children are forked from a process that has imported PyAV, and ahead of need, so that a request pays for decoding
only. Each ends with its clip: what a hostile file did to its decoder goes no further.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

from vidspec_service.decoding.clip import Clip, FrameRequest, check_request
from vidspec_service.decoding.isolation import fork_server
from vidspec_service.decoding.isolation.child import Job
from vidspec_service.decoding.isolation.process import DecodeChild
from vidspec_service.decoding.isolation.sandbox import report_missing
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.errors import CapacityError, ConfigError, Draining, ServiceError
from vidspec_service.forking import ForkServer

_START_TIMEOUT_S = 60.0  # an idle machine needs 0.2 s


class DecodePool:
    """At most `max_workers` clips are decoded at a time, and as many spare children wait ready.

    An async context manager; after leaving it no child is left. One event loop owns it.
    """

    def __init__(self, limits: DecodingLimits, max_workers: int) -> None:
        self._limits = limits
        self._max_workers = max_workers
        self._slots = asyncio.Semaphore(max_workers)
        # One thread per decode and one per start. They also keep the fork server alive: it dies with the thread
        # that started it (PR_SET_PDEATHSIG), and these live as long as the pool.
        self._threads = ThreadPoolExecutor(2 * max_workers, thread_name_prefix="decode")
        self._forks = ForkServer(fork_server.__name__, is_bare=True)
        self._spares: deque[asyncio.Task[DecodeChild]] = deque()
        self._children: set[DecodeChild] = set()
        self._work: set[asyncio.Future[Clip]] = set()
        self._is_closed = False

    async def __aenter__(self) -> DecodePool:
        """Start the spares and wait for the first: ConfigError if decoding does not work on this machine."""
        self._spares.extend(self._spare() for _ in range(self._max_workers))
        try:
            report_missing((await asyncio.shield(self._spares[0])).missing)
        except ServiceError as error:
            await self.close()
            raise ConfigError(error.message) from error
        except asyncio.CancelledError:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def decode(self, path: Path, request: FrameRequest, default_num_frames: int) -> Clip:
        """Frames and facts of the video at `path`, which must stay there meanwhile; waits for a free slot.

        A request's videos that share its limits share `default_num_frames` as well: rounded down, at least one each.

        Raises InvalidRequest, VideoUnsupported, VideoUnreadable (also for a decode that takes too long) or
        VideoTooLarge; CapacityError if no child can be started, Draining if the pool closes. Cancelling kills
        the child. `video.frames` is read-only and not copied; its memory goes when the array goes.
        """
        limits = self._limits.shared(request.num_sharing)
        check_request(request, limits)  # needs no child
        default = max(1, default_num_frames // request.num_sharing)
        job = Job(path=str(path), request=request, default_num_frames=default, limits=limits)
        async with self._slots:
            child = await self._take_spare()
            try:
                return await self._run(child, job)
            finally:
                self._children.discard(child)

    async def close(self) -> None:
        """Kill and reap every child; decodes still running raise Draining. May be called again."""
        self._is_closed = True
        for child in self._children:
            child.kill()
        await asyncio.gather(*self._spares, *self._work, return_exceptions=True)
        await asyncio.gather(*map(self._end, tuple(self._children)))
        self._spares.clear()
        self._forks.close()
        self._threads.shutdown(wait=False)  # idle by now

    async def _run(self, child: DecodeChild, job: Job) -> Clip:
        named = copy_context()  # or a line in the log about this decode would not tell whose it was
        work = asyncio.wrap_future(self._threads.submit(named.run, child.decode, job))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            return await asyncio.shield(work)
        except ServiceError as error:
            if self._is_closed:
                raise Draining("The server is shutting down.") from error
            raise
        except asyncio.CancelledError:
            child.kill()
            # The thread returns within milliseconds; the slot is not free before.
            await asyncio.wait({work})
            _ = work.cancelled() or work.exception()  # nobody else asks: asyncio would log what was never retrieved
            raise

    async def _take_spare(self) -> DecodeChild:
        """The oldest spare, once ready; another is started in its place."""
        for _ in range(self._max_workers + 1):  # any of the spares may have been killed since, for memory
            if self._is_closed:
                raise Draining("The server is shutting down.")
            spare = self._spares.popleft()
            try:
                child = await asyncio.shield(spare)
            except asyncio.CancelledError:
                self._spares.append(spare)
                raise
            except ServiceError:
                self._spares.append(self._spare())
                continue
            self._spares.append(self._spare())
            if child.is_alive:
                return child
            await self._end(child)
        raise CapacityError("No video decoder can be started at the moment; try again.")

    def _spare(self) -> asyncio.Task[DecodeChild]:
        return asyncio.create_task(self._start())

    async def _start(self) -> DecodeChild:
        child = DecodeChild(self._forks)
        self._children.add(child)
        try:
            await asyncio.wrap_future(self._threads.submit(child.start, _START_TIMEOUT_S))
        except ServiceError:
            self._children.discard(child)
            raise
        return child

    async def _end(self, child: DecodeChild) -> None:
        await asyncio.wrap_future(self._threads.submit(child.end))
        self._children.discard(child)
