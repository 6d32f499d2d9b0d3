"""Server-sent events: how an event, a keep-alive, an error and the end mark look on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel
from starlette.types import Message, Send

from vidspec_service.api.guard import ClientGone

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx collects the tokens
}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class EventWriter:
    """Writes events to one client, and a comment whenever nothing was written for `keep_alive_s`."""

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._written_at = 0.0

    async def begin(self) -> None:
        """Send status and headers; from here on an error can only be an event."""
        self._written_at = asyncio.get_running_loop().time()
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        await self._pass({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, payload: BaseModel) -> None:
        """One `data:` event."""
        await self._write(f"data: {payload.model_dump_json()}\n\n".encode())

    async def fail(self, body: dict[str, Any]) -> None:
        """The error event, shaped like every other error, and the end."""
        await self._write(f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())
        await self.end()

    async def end(self) -> None:
        """The end mark and the end of the body."""
        await self._pass({"type": "http.response.body", "body": DONE, "more_body": False})

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Fill pauses inside the block with comments."""
        filler = asyncio.create_task(self._fill_pauses())
        try:
            yield
        finally:
            filler.cancel()
            await asyncio.gather(filler, return_exceptions=True)

    async def _write(self, chunk: bytes) -> None:
        self._written_at = asyncio.get_running_loop().time()
        await self._pass({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # how some servers say that the client has left
            raise ClientGone from error

    async def _fill_pauses(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause_left = self._written_at + self._keep_alive_s - loop.time()
            if pause_left > 0:
                await asyncio.sleep(pause_left)
            else:
                await self._write(KEEP_ALIVE)
