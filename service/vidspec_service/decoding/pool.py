"""DecodePool: decodes videos in confined children, one clip each, without blocking the event loop.

Children are forked ahead of need, from a process that has imported PyAV, so that a request pays for decoding only.
Each ends with its clip: a decoder that a hostile file has taken over never decodes another file.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from vidspec_service.decoding.clip import Clip, Decoded, DecodingLimits, FrameRequest, Shard
from vidspec_service.decoding.isolation import fork_server
from vidspec_service.decoding.isolation.fork_server import DecodeFailed, DecodeJob, DecodeResult
from vidspec_service.decoding.isolation.process import (
    DecodeChild,
    ForkServerLost,
    clip_of,
    decoded_of,
    frames_memory,
)
from vidspec_service.decoding.isolation.sandbox import report_missing
from vidspec_service.errors import CapacityError, ConfigError, Draining, ServiceError, VideoUnreadable
from vidspec_service.forking import ForkServer

T = TypeVar("T")

_START_TIMEOUT_S = 60.0  # an idle machine needs 0.2 s
_SHARD_BYTES = 512 * 1024  # of a file for each child: less is not worth another one, which walks all packets again


class DecodePool:
    """`max_workers` children are meant to work at a time, and as many spares wait ready.

    One more clip is taken, for a caller who comes while another's hold all children for a minute, and no clip waits for
    the children that decode the parts of a long one. So there may be twice as many.

    An async context manager; after leaving it no child is left. One event loop owns it.
    """

    def __init__(self, limits: DecodingLimits, max_workers: int) -> None:
        self._limits = limits
        self._max_workers = max_workers
        self._clips = asyncio.Semaphore(max_workers + 1)
        self._num_busy = 0  # children
        self._forks = ForkServer(fork_server.__name__, is_bare=True)
        self._spares: deque[asyncio.Task[DecodeChild]] = deque()
        self._children: set[DecodeChild] = set()
        self._work: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    async def __aenter__(self) -> DecodePool:
        """Start the spares and wait for the first: ConfigError if decoding does not work on this machine."""
        self._spares.extend(self._spare() for _ in range(self._max_workers))
        try:
            report_missing((await asyncio.shield(self._spares[0])).missing)
        except BaseException as error:
            await self.close()
            if isinstance(error, ServiceError):
                raise ConfigError(error.message) from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def decode(self, path: Path, request: FrameRequest) -> Clip:
        """Frames and facts of the video at `path`, which must stay there meanwhile; waits for a free slot.

        A request's videos share its limits and the default number of frames equally: rounded down, at least one each.

        Raises InvalidRequest, VideoUnsupported, VideoUnreadable (also for a decode that takes too long) or
        VideoTooLarge; CapacityError if no child can be started, Draining if the pool closes. Cancelling kills
        the child. `video.frames` is read-only and not copied; its memory goes when the array goes.
        """
        limits = self._limits.shared(request.num_sharing)
        limits.check_num_frames(request.num_frames)  # needs no child
        # Children have another working folder. Ours may be gone, but only a relative path needs it.
        absolute = os.path.abspath(path)  # noqa: ASYNC240  touches no file
        job = DecodeJob(path=os.fsencode(absolute), request=request, limits=limits)
        async with self._clips:
            num_shards = max(1, min(_max_shards(job), self._max_workers - self._num_busy))
            if num_shards > 1:
                with self._busy(num_shards):
                    if (clip := await self._decode_sharded(job, num_shards)) is not None:
                        return clip
            with self._busy(1), frames_memory() as frames:
                return clip_of(decoded_of(await self._run(job, frames)), frames, limits)

    @contextmanager
    def _busy(self, num_children: int) -> Iterator[None]:
        self._num_busy += num_children
        try:
            yield
        finally:
            self._num_busy -= num_children

    async def _decode_sharded(self, job: DecodeJob, count: int) -> Clip | None:
        """Like `decode`, by several children at once; None if the clip is not sound: it must be decoded as a whole."""
        with frames_memory() as frames:
            jobs = (structs.replace(job, shard=Shard(index, count)) for index in range(count))
            shards = await all_or_none([self._run(each, frames) for each in jobs])
            if any(isinstance(shard, DecodeFailed) and shard.kind == VideoUnreadable.__name__ for shard in shards):
                return None
            whole = merge_shards([decoded_of(shard) for shard in shards])
            return None if whole is None else clip_of(whole, frames, job.limits)

    async def close(self) -> None:
        """Kill and reap every child; decodes still running raise Draining. May be called again."""
        self._is_closed = True
        for child in self._children:
            child.kill()
        await asyncio.gather(*self._spares, *self._work, return_exceptions=True)
        await asyncio.gather(*map(self._end, tuple(self._children)))
        self._forks.close()

    async def _run(self, job: DecodeJob, frames: FileIO) -> DecodeResult:
        """Run `job` in a child, which decodes into `frames`; if the fork server dies, once more in another child."""
        for _ in range(2):
            try:
                return await self._run_once(job, frames)
            except ForkServerLost:
                await self._renew_spares()
        raise CapacityError("The server's decoders were lost twice; try again.")

    async def _run_once(self, job: DecodeJob, frames: FileIO) -> DecodeResult:
        child = await self._take_spare()
        work = asyncio.create_task(child.decode(job, frames))
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
            while not work.done():  # milliseconds; until then the slot is in use
                with suppress(asyncio.CancelledError):  # its client leaves, then the server ends, for one
                    await asyncio.wait({work})
            _ = work.cancelled() or work.exception()  # asyncio logs exceptions that nobody has retrieved
            raise
        finally:
            self._children.discard(child)

    async def _renew_spares(self) -> None:
        """Replace all spares: they die with the fork server that they come from, if they are not dead yet."""
        if self._is_closed:  # no more are started
            return
        doomed = tuple(self._spares)
        self._spares = deque(self._spare() for _ in doomed)
        ends = asyncio.gather(*map(self._end_spare, doomed))
        self._work.add(ends)
        ends.add_done_callback(self._work.discard)
        await asyncio.shield(ends)  # goes on if the caller is cancelled

    async def _take_spare(self) -> DecodeChild:
        """The oldest spare, once ready; another is started in its place."""
        for _ in range(self._max_workers + 1):  # any spare may have been killed since, for lack of memory
            if self._is_closed:
                raise Draining("The server is shutting down.")
            spare = self._spares.popleft() if self._spares else self._spare()
            try:
                await asyncio.wait({spare})
            except asyncio.CancelledError:
                self._spares.append(spare)
                raise
            # `close` kills the spare that somebody waits for: no other may outlive it.
            if not self._is_closed and len(self._spares) < self._max_workers:
                self._spares.append(self._spare())
            if spare.exception() is None and (child := spare.result()).is_alive:
                return child
            await self._end_spare(spare)
        raise CapacityError("No video decoder can be started at the moment; try again.")

    def _spare(self) -> asyncio.Task[DecodeChild]:
        return asyncio.create_task(self._start())

    async def _start(self) -> DecodeChild:
        child = DecodeChild(self._forks)
        self._children.add(child)
        try:
            await child.start(_START_TIMEOUT_S)
        except ServiceError:
            self._children.discard(child)
            raise
        return child

    async def _end_spare(self, spare: asyncio.Task[DecodeChild]) -> None:
        with suppress(ServiceError):  # it could not be started
            await self._end(await spare)

    async def _end(self, child: DecodeChild) -> None:
        await child.end()
        self._children.discard(child)


def _max_shards(job: DecodeJob) -> int:
    """The most children that may decode one video at once, if no other request needs them."""
    if job.request.is_still or job.request.sequence is not None:
        return 1
    try:
        return 1 + os.stat(job.path).st_size // _SHARD_BYTES
    except OSError:  # the child will report it
        return 1


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; if one fails, the others are cancelled and have ended before its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def merge_shards(shards: Sequence[Decoded]) -> Decoded | None:
    """The whole clip; None if a shard is not sound, or frames differ in size or orientation between shards."""
    kinds = {(shard.width, shard.height, shard.orientation) for shard in shards if shard.timestamps_s}
    if len(kinds) != 1 or not shards[0].timestamps_s or not all(shard.is_sound for shard in shards):
        return None
    return structs.replace(  # both increase with the frame's place; `clip_of` checks that both are complete
        shards[0],
        timestamps_s=tuple(sorted(time_s for shard in shards for time_s in shard.timestamps_s)),
        source_indices=tuple(sorted(index for shard in shards for index in shard.source_indices)),
    )
