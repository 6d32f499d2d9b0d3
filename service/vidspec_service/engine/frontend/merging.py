"""Several streams of events read at the same time, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from vidspec_service.engine.types import GenerationEvent

Heard = asyncio.Queue[GenerationEvent | Exception | None]


async def merged(streams: Sequence[AsyncGenerator[GenerationEvent, None]]) -> AsyncGenerator[GenerationEvent, None]:
    """The events of all streams, as they come. Raises the first error; every stream is closed in the end."""
    heard: Heard = asyncio.Queue()  # bounded by the answers' max_tokens
    listeners = [asyncio.create_task(listen(events, heard)) for events in streams]
    try:
        num_left = len(listeners)
        while num_left:
            event = await heard.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_left -= 1
            else:
                yield event
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)


async def listen(events: AsyncGenerator[GenerationEvent, None], heard: Heard) -> None:
    """Put every event into `heard`, and last the error that ended them, or None. Closes `events` if cancelled."""
    try:
        async with aclosing(events):
            async for event in events:
                heard.put_nowait(event)
        heard.put_nowait(None)
    except Exception as error:
        heard.put_nowait(error)
