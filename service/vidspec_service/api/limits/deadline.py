"""Ends a request's work early, for whichever reason comes first: client gone, time over, server closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from vidspec_service.errors import DeadlineExceeded, Draining

T = TypeVar("T")


@asynccontextmanager
async def alongside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` beside the block; at its end the work is cancelled, and waited for until it has cleaned up."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Deadline:
    """The time that one request has from now on, and the other reasons to stop it.

    Starlette leaves disconnects to a failing `send` under some servers and to a watcher under others. Here
    `receive` is always watched, so that a client that leaves during a decode is noticed too. While the body
    is being read, the reader owns `receive` (pass None) and hears of a disconnect itself.
    """

    def __init__(self, timeout_s: float, closing: asyncio.Event, receive: Receive | None = None) -> None:
        self._timeout_s = timeout_s
        self._closing = closing
        self._receive = receive
        self._ends_at = asyncio.get_running_loop().time() + timeout_s

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or cancel it, wait until it has cleaned up, and raise the reason.

        The reasons are ClientDisconnect, Draining and DeadlineExceeded.
        """
        time_left = self._ends_at - asyncio.get_running_loop().time()
        async with (
            alongside(work) as task,
            alongside(self._closing.wait()) as closing,
            alongside(self._client_gone()) as gone,
        ):
            tasks: tuple[asyncio.Task[Any], ...] = (task, closing, gone)
            done, _ = await asyncio.wait(tasks, timeout=time_left, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if gone in done:
            raise ClientDisconnect
        if closing in done:
            raise Draining("The server is shutting down and had to end this request.")
        raise DeadlineExceeded(f"The request took longer than {self._timeout_s:g} s (VIDSPEC_REQUEST_TIMEOUT_S).")

    async def _client_gone(self) -> None:
        if self._receive is None:
            await asyncio.Event().wait()
            return
        while (await self._receive())["type"] != "http.disconnect":
            pass
