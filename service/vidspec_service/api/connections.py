"""Bounds the number of connections, so that file descriptors are left for what the server itself has to open.

Without a bound a flood of connections takes every descriptor. Then valid videos seem damaged, and asyncio, which
tries to accept as often as its backlog is long, logs a hundred thousand lines a minute.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vidspec_service.api.errors import error_response
from vidspec_service.api.store.clips import LEAST_BYTES
from vidspec_service.errors import InvalidRequest, QueueFull, ServiceError
from vidspec_service.settings import Settings

BACKLOG = 128  # connections that are accepted in one go, before any of them can be closed
_PER_REQUEST = 4  # a video's file, a payload, a decode child's socket and its frames
_PER_CLIP = 2  # both for its frames' memory: one to map it here, one to pass to the workers
_OWN = 128  # channels, logs, libraries
_LOG_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


def connections_allowed(settings: Settings) -> int:
    """How many connections there are descriptors for; first raises this process's soft limit to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_requests = settings.max_running_requests + settings.max_queued_requests
    num_clips = settings.max_cached_frame_bytes // LEAST_BYTES
    # A payload has one more descriptor for the memory of each of its clips.
    per_request = _PER_REQUEST + settings.max_videos_per_request * (_PER_CLIP + 1)
    reserved = _OWN + BACKLOG + num_requests * per_request + num_clips * _PER_CLIP
    return max(most - reserved, most // 4)


class Seldom:
    """A log line that is written at most once a minute."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._next_s = 0.0

    def warn(self, **facts: object) -> None:
        """Write the line, unless it was written within the last minute."""
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + _LOG_PAUSE_S
            _log.warning(self._event, extra=facts)


def _written(error: ServiceError) -> bytes:
    """The answer to a client of whose request there is nothing to route."""
    response = error_response(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
    return b"\r\n".join([*lines, *(b": ".join(header) for header in headers), b"", response.body])


class _Http(H11Protocol):
    """uvicorn's protocol in Python, also where httptools is installed, which uvicorn would prefer.

    That one holds headers of any size in memory, loses the body of a request that offers HTTP/2 (as Java's client
    does), and sends chunks to clients of HTTP/1.0.
    """

    _NO_HTTP = _written(InvalidRequest("This is not a valid HTTP/1.1 request, or its headers are too large."))

    def _should_upgrade(self) -> bool:
        return False  # to HTTP/2 or WebSocket: the request is answered as if it had not offered that

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun
            self.transport.write(self._NO_HTTP)
        self.transport.close()


def protocol_for(most: int) -> type[asyncio.Protocol]:
    """HTTP for the server; a connection beyond `most` gets a 503 before it has sent a request."""
    line = Seldom("too many connections")
    too_many = _written(QueueFull("The server has too many connections; try again."))

    class Bounded(_Http):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            if len(self.connections) < most:
                super().connection_made(transport)
                return
            line.warn(most=most)
            transport.write(too_many)
            transport.abort() if transport.get_write_buffer_size() else transport.close()

        def connection_lost(self, error: Exception | None) -> None:
            if self in self.connections:
                super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            if self in self.connections:
                super().data_received(data)

        def eof_received(self) -> None:
            if self in self.connections:
                super().eof_received()

    return Bounded


def quiet_when_out_of_descriptors() -> Callable[[asyncio.AbstractEventLoop, dict[str, object]], None]:
    """A loop's exception handler that logs once a minute that connections cannot be accepted, not for each of them."""
    line = Seldom("no file descriptors are left to accept connections")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if str(context.get("message", "")).startswith("socket.accept() out of system resource"):
            line.warn(error=str(context.get("exception")))
        else:
            loop.default_exception_handler(context)

    return handle
