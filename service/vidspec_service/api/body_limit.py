"""Pure ASGI, around every route: no body over the limit is read, and a refused client gets to read why.

Deliberate: after an answer that was given early, the rest of the body is read and thrown away for a moment.
A server that closes at once makes the kernel reset the connection: the client never sees the 413 or 503.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidspec_service.api.problems import answer
from vidspec_service.errors import VideoTooLarge

_LINGER_S = 5.0
LINGER_BYTES = 64 * 1024 * 1024


class BodyLimit:
    """Refuses a body over `max_bytes`: by its declared length first, else once as many bytes have come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event; only HTTP has a body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = _Body(receive, headers, self._max_bytes)

        async def send_then_linger(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or body.is_finished:
                await send(message)
                return
            await send({**message, "more_body": True})
            await body.discard()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        if int(headers.get("content-length", 0)) > self._max_bytes:
            await answer(_too_large(self._max_bytes))(scope, receive, send_then_linger)
        else:
            await self._app(scope, body.receive, send_then_linger)


class _Body:
    """One request's body: how much has come, and whether more is to come."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        waits_for_consent = headers.get("expect", "").lower() == "100-continue"  # given by the first receive
        self.is_finished = not has_body or waits_for_consent

    async def receive(self) -> Message:
        """The next message, counted; raises VideoTooLarge."""
        message = await self._next()
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message

    async def discard(self) -> None:
        """Read on for a bounded time and size, keeping nothing. The answer is given: a server that ends now stops."""
        most = self._num_bytes + max(self._max_bytes, LINGER_BYTES)
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self.is_finished and self._num_bytes < most:
                    await self._next()
        except (TimeoutError, asyncio.CancelledError):
            pass

    async def _next(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self.is_finished = not message.get("more_body", False)
        return message


def _too_large(max_bytes: int) -> VideoTooLarge:
    return VideoTooLarge(
        f"The body is larger than {max_bytes:,} bytes, what the largest video allowed here needs "
        "(VIDSPEC_MAX_UPLOAD_BYTES, VIDSPEC_MAX_JSON_BYTES).",
    )
