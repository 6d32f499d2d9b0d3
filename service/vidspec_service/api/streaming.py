"""A generation as an event stream, and as one JSON answer."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vidspec_service.api.dialects import Dialect
from vidspec_service.api.generation import Generation
from vidspec_service.api.guard import ClientGone
from vidspec_service.api.problems import body_of
from vidspec_service.api.sse import EventWriter
from vidspec_service.errors import ServiceError

LAST_WORDS_S = 2.0  # a client that does not read must not hold its place beyond its deadline

_log = logging.getLogger(__name__)


async def whole_answer(generation: Generation, dialect: Dialect) -> Response:
    """Wait for the last token."""
    text = await generation.guarded(_text_of(generation))
    return Response(dialect.whole(generation, text).model_dump_json(), media_type="application/json")


class StreamedAnswer(Response):
    """Writes a started generation as server-sent events and owns everything the request still holds.

    Not a StreamingResponse: that one hears of a disconnect only when it next sends, and cannot turn an error
    into an event.
    """

    def __init__(self, generation: Generation, dialect: Dialect, held: AsyncExitStack, keep_alive_s: float) -> None:
        super().__init__()
        self._generation = generation
        self._dialect = dialect
        self._held = held
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream to the end, to an error event, or until nobody listens; then let go of everything."""
        async with self._held:
            writer = EventWriter(send, self._keep_alive_s)
            try:
                error = await self._stream(writer)
                async with asyncio.timeout(LAST_WORDS_S):
                    await (writer.fail(body_of(error)) if error else writer.end())
            except (ClientGone, TimeoutError):
                return

    async def _stream(self, writer: EventWriter) -> ServiceError | None:
        """Everything but the last words; gives back what went wrong, since the status is sent already."""
        try:
            await writer.begin()
            async with writer.kept_alive():
                await self._generation.guarded(self._write_events(writer))
        except ClientGone:
            raise
        except ServiceError as error:
            _log.warning("stream failed", extra={"code": error.code, "reason": error.message})
            return error
        except Exception:
            _log.exception("stream failed")  # a bug of ours
            return ServiceError("unhandled")
        return None

    async def _write_events(self, writer: EventWriter) -> None:
        generation, dialect = self._generation, self._dialect
        await writer.event(dialect.chunk(generation, {"role": "assistant", "content": ""}))
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                await writer.event(dialect.chunk(generation, {"content": piece}))
        await writer.event(dialect.chunk(generation, {}, generation.finish_reason))
        final = dialect.final(generation)
        if final is not None:
            await writer.event(final)


async def _text_of(generation: Generation) -> str:
    async with aclosing(generation.pieces()) as pieces:
        return "".join([piece async for piece in pieces])
