"""Several streams of events read at the same time, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from vidspec_service.engine.types import GenerationEvent

EventQueue = asyncio.Queue[GenerationEvent | Exception | None]


async def merge_streams(
    streams: Sequence[AsyncGenerator[GenerationEvent, None]],
) -> AsyncGenerator[GenerationEvent, None]:
    """The events of all streams, as they come. Raises the first error; every stream is closed in the end."""
    queue: EventQueue = asyncio.Queue()  # bounded by the answers' max_tokens
    tasks = [asyncio.create_task(enqueue_events(events, queue)) for events in streams]
    try:
        num_left = len(tasks)
        while num_left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def enqueue_events(events: AsyncGenerator[GenerationEvent, None], queue: EventQueue) -> None:
    """Put every event into `queue`, and last the error that ended them, or None. Closes `events` if cancelled."""
    try:
        async with aclosing(events):
            async for event in events:
                queue.put_nowait(event)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)
