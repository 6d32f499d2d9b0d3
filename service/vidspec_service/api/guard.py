"""Ends a request's work early, for whichever reason comes first: client gone, time over, server closing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from vidspec_service.errors import DeadlineExceeded, Draining, ServiceError

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""


class Guard:
    """The reasons to stop one request; its clock starts now.

    Starlette leaves disconnects to a failing `send` under some servers and to a watcher under others. Here
    `receive` is always watched, so that a client that leaves during a decode is noticed too. While the body
    is being read, the reader owns `receive` (pass None) and hears of a disconnect itself.
    """

    def __init__(
        self,
        receive: Receive | None,
        closing: asyncio.Event,
        timeout_s: float,
        late: ServiceError | None = None,
    ) -> None:
        self._receive = receive
        self._closing = closing
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._late = late or DeadlineExceeded(
            f"The request took longer than {timeout_s:g} s (VIDSPEC_REQUEST_TIMEOUT_S)."
        )

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or cancel it, wait until it has cleaned up, and raise the reason."""
        task = asyncio.create_task(work)
        closing = asyncio.create_task(self._closing.wait())
        gone = asyncio.create_task(self._client_gone())
        tasks: tuple[asyncio.Task[Any], ...] = (task, closing, gone)
        time_left = self._deadline - asyncio.get_running_loop().time()
        try:
            done, _ = await asyncio.wait(tasks, timeout=time_left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if task in done:
            return task.result()
        if gone in done:
            raise ClientGone
        if closing in done:
            raise Draining("The server is shutting down and had to end this request.")
        raise self._late

    async def _client_gone(self) -> None:
        if self._receive is None:
            await asyncio.Event().wait()
            return
        while (await self._receive())["type"] != "http.disconnect":
            pass
