"""A generation as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack, aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vidspec_service.api.errors import error_body
from vidspec_service.api.generate.generation import Generation
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.api.schemas.dialects import Dialect
from vidspec_service.engine.types import Finished
from vidspec_service.errors import ServiceError

FINAL_WRITE_TIMEOUT_S = 2.0  # a client that does not read must not hold its permit beyond its deadline
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the tokens
]

_log = logging.getLogger(__name__)


class EventStream(Response):
    """Writes a started generation as events; owns everything that the request still holds.

    Writes a comment whenever nothing was written for `keep_alive_s`. This is not a StreamingResponse, which notices a
    disconnect only when it next sends, and cannot turn an error into an event.
    """

    def __init__(self, generation: Generation, dialect: Dialect, held: AsyncExitStack, keep_alive_s: float) -> None:
        super().__init__()
        self._generation = generation
        self._events = dialect.events(generation.head, generation.take_extras, generation.reasoning)
        self._held = held
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream to the end, to an error event, or until the client leaves; then release everything."""
        self._send = send
        async with self._held:
            try:
                error = await self._stream()
                async with asyncio.timeout(FINAL_WRITE_TIMEOUT_S):
                    if error is not None:
                        await self._write_all(self._events.on_error(error_body(error)))
                    await self._write("", is_last=True)
            except (ClientDisconnect, TimeoutError):
                return

    async def _stream(self) -> ServiceError | None:
        """Write all but the last event; returns an error instead of raising it, since the status is sent already."""
        try:
            told = [(name.encode(), value.encode()) for name, value in self._generation.headers.items()]
            await self._pass({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *told]})
            async with background_task(self._fill_pauses()):
                await self._generation.run(self._write_events())
        except ClientDisconnect:
            raise
        except ServiceError as error:
            _log.warning("stream failed", extra={"code": error.code, "reason": error.message})
            return error
        except Exception:
            _log.exception("stream failed")  # a bug of ours
            return ServiceError("unhandled")
        return None

    async def _write_events(self) -> None:
        generation, events = self._generation, self._events
        await self._write_all(events.on_start())
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Finished):
                    await self._write_all(events.on_choice_end(piece.choice, piece.finish_reason.value))
                else:
                    await self._write_all(events.on_text(piece.choice, piece.text, generation.token_info([piece])))
        await self._write_all(events.on_end(generation.facts()))

    async def _write_all(self, events: Iterable[str]) -> None:
        for event in events:
            await self._write(event)

    async def _fill_pauses(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause_left = self._written_at + self._keep_alive_s - loop.time()
            if pause_left > 0:
                await asyncio.sleep(pause_left)
            else:
                await self._write(": keep-alive\n\n")

    async def _write(self, text: str, *, is_last: bool = False) -> None:
        await self._pass({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})

    async def _pass(self, message: Message) -> None:
        self._written_at = asyncio.get_running_loop().time()
        try:
            await self._send(message)
        except OSError as error:  # how some servers say that the client has left
            raise ClientDisconnect from error
