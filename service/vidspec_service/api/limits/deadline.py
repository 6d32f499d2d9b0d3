"""Ends a request's work early, for whichever reason comes first: client gone, time over, server closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from vidspec_service.errors import DeadlineExceeded, Draining

T = TypeVar("T")
_MIN_WAIT_S = 0.02
MAX_EXTENSION_S = 60.0  # for the time that a request waited while the target was restarted


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` while the block runs; at its end the work is cancelled, and waited for until it has cleaned up."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Deadline:
    """The time that one request has from now on, and the other reasons to stop it.

    Starlette notices a disconnect by a failing `send` under some servers and by a watcher under others. Here
    `receive` is always watched, so that a client that leaves during a decode is noticed too. While the body
    is being read, the reader owns `receive` (pass None) and notices a disconnect itself.

    The client does not pay for our outages: the time that the engine had no target is added, MAX_EXTENSION_S at most.
    `outage_s` returns the sum of all such times.
    """

    def __init__(
        self,
        timeout_s: float,
        closing: asyncio.Event,
        receive: Receive | None = None,
        outage_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._closing = closing
        self._receive = receive
        self._outage_s = outage_s
        self._outage_before_s = outage_s()
        self._ends_at = asyncio.get_running_loop().time() + timeout_s

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or cancel it, wait until it has cleaned up, and raise the reason.

        The reasons are ClientDisconnect, Draining and DeadlineExceeded.
        """
        async with (
            background_task(work) as task,
            background_task(self._closing.wait()) as closing,
            background_task(self._client_gone()) as gone,
        ):
            tasks: tuple[asyncio.Task[Any], ...] = (task, closing, gone)
            done: set[asyncio.Task[Any]] = set()
            while not done and (time_left := self._time_left()) > 0:
                # While there is no target, the end moves on with the clock, so it is computed again now and then.
                timeout = max(time_left, _MIN_WAIT_S)
                done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        if gone in done:
            raise ClientDisconnect
        if closing in done:
            raise Draining("The server is shutting down and had to end this request.")
        raise DeadlineExceeded(f"The request took longer than {self._timeout_s:g} s (VIDSPEC_REQUEST_TIMEOUT_S).")

    def _time_left(self) -> float:
        extended_s = min(self._outage_s() - self._outage_before_s, MAX_EXTENSION_S)
        return self._ends_at + extended_s - asyncio.get_running_loop().time()

    async def _client_gone(self) -> None:
        if self._receive is None:
            await asyncio.Event().wait()
            return
        while (await self._receive())["type"] != "http.disconnect":
            pass
