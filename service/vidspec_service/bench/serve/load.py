"""Closed loads (a fixed number of requests at once) and open loads (requests at fixed times, however slow the server).

Also the requests: rendered scenes, including clients that leave early.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_service.bench.common.scenes import write_scene
from vidspec_service.bench.serve.client import LoadClient, LoadRequest, RequestOutcome

_CANCEL_SHARE, _HANG_UP_SHARE = 0.25, 0.15
_SIZES = (256, 128, 512)  # pixels a side; the first is `render-clip`'s

OnDone = Callable[[int], None]  # called with the number of answers so far


async def closed_load(
    client: LoadClient, requests: Iterable[LoadRequest], concurrency: int, on_done: OnDone
) -> tuple[list[RequestOutcome], float]:
    """Outcomes in the order in which requests ended, and the seconds that the load took."""
    began, outcomes, waiting = time.perf_counter(), list[RequestOutcome](), iter(requests)

    async def sender() -> None:
        for request in waiting:  # all senders share one iterator
            outcomes.append(await client.send(request, began, time.perf_counter() - began))
            on_done(len(outcomes))

    async with asyncio.TaskGroup() as senders:
        for _ in range(concurrency):
            senders.create_task(sender())
    return outcomes, time.perf_counter() - began


async def open_load(
    client: LoadClient, requests: Iterator[LoadRequest], due_s: Sequence[float], on_done: OnDone
) -> tuple[list[RequestOutcome], float]:
    """Send a request at each time in `due_s` (seconds since the start); returns when all have ended."""
    began, outcomes = time.perf_counter(), list[RequestOutcome]()

    async def send(request: LoadRequest, due: float) -> None:
        outcomes.append(await client.send(request, began, due))
        on_done(len(outcomes))

    async with asyncio.TaskGroup() as senders:
        for due, request in zip(due_s, requests, strict=False):
            await asyncio.sleep(max(began + due - time.perf_counter(), 0))
            senders.create_task(send(request, due))
    return outcomes, time.perf_counter() - began


def poisson_times(rate: float, rng: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process, without end."""
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def render_clips(count: int, *, is_mixed: bool) -> list[bytes]:
    """MP4 files of four seconds, all of one size or, if mixed, of several."""
    clips = []
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        for index in range(count):
            size = _SIZES[index % len(_SIZES)] if is_mixed else _SIZES[0]
            path = Path(folder) / f"{index}.mp4"
            write_scene(TEST_SEEDS[index], path, size)
            clips.append(path.read_bytes())
    return clips


def mixed_requests(
    clips: Iterator[bytes], most_tokens: int, num_frames: int | None, rng: random.Random
) -> Iterator[LoadRequest]:
    """Requests for answers of any length; a quarter are cancelled, 15 % are never fully sent."""
    for clip in clips:
        fate = rng.random()
        yield LoadRequest(
            clip=clip,
            max_tokens=rng.randint(1, most_tokens),
            num_frames=rng.choice((None, 1, 4, 8)) if num_frames is None else num_frames,
            leave_after_events=rng.randint(1, 1 + most_tokens // 4) if fate < _CANCEL_SHARE else None,
            leave_after_bytes=rng.randrange(len(clip)) if fate > 1 - _HANG_UP_SHARE else None,
        )
