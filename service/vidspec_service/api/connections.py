"""Bounds the number of connections, so that file descriptors are left for what the server itself has to open.

Without a bound a flood of connections takes every descriptor. Then valid videos seem damaged, and asyncio, which
tries to accept as often as its backlog is long, logs a hundred thousand lines a minute.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import time
from collections.abc import Callable
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vidspec_service.api.errors import error_response
from vidspec_service.api.store.clip_cache import MIN_CLIP_BYTES
from vidspec_service.errors import InvalidRequest, QueueFull, ServiceError
from vidspec_service.settings import Settings

BACKLOG = 128  # connections that are accepted in one go, before any of them can be closed
_PER_REQUEST = 4  # a video's file, a payload, a decode child's socket and its frames
_PER_CLIP = 2  # both for its frames' memory: one to map it here, one to pass to the workers
_OWN = 128  # for channels, logs and libraries
_MIN_INTERVAL_S = 60.0
# How long a connection stays open after an answer. A request that a proxy sends into a connection as it closes is a
# 502 to its client, so the proxy has to close it first; of those we know, Google's waits longest: 600 s.
_KEEP_ALIVE_S = 620
_CROWDED_KEEP_ALIVE_S = 5
_CROWD = 1000  # more than any proxy has use for; one that rests takes 13 KB

_log = logging.getLogger(__name__)


def max_connections(settings: Settings) -> int:
    """How many connections leave enough descriptors free; first raises this process's soft limit to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_requests = settings.max_running_requests + settings.max_queued_requests
    num_clips = settings.max_cached_frame_bytes // MIN_CLIP_BYTES
    # A payload has one more descriptor for the memory of each of its clips.
    per_request = _PER_REQUEST + settings.max_videos_per_request * (_PER_CLIP + 1)
    reserved = _OWN + BACKLOG + num_requests * per_request + num_clips * _PER_CLIP
    return max(most - reserved, most // 4)


class ThrottledWarning:
    """A warning that is logged at most once a minute."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._next_s = 0.0

    def log(self, **facts: object) -> None:
        """Log it, unless it was logged within the last minute."""
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + _MIN_INTERVAL_S
            _log.warning(self._event, extra=facts)


def _raw_response(error: ServiceError) -> bytes:
    """The bytes of a response that is sent before any request has been parsed, and closes the connection."""
    response = error_response(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
    return b"\r\n".join([*lines, *(b": ".join(header) for header in headers), b"", response.body])


_IPV4_IN_IPV6 = re.compile(r"::ffff:(?=[\d.]+$)")  # how a socket for both spells an IPv4 address
_NOT_HTTP = _raw_response(InvalidRequest("This is not a valid HTTP/1.1 request, or its headers are too large."))
_TOO_MANY = _raw_response(QueueFull("The server has too many connections; try again."))


def bounded_protocol(limit: int) -> type[asyncio.Protocol]:
    """HTTP for the server; a connection beyond `limit` gets a 503 before it has sent a request.

    Where there are many, one that waits for its next request is soon closed.
    """
    crowded, no_http = ThrottledWarning("too many connections"), ThrottledWarning("a request is not valid HTTP")

    class HttpProtocol(H11Protocol):
        """uvicorn's protocol in Python, also where httptools is installed, which uvicorn would prefer.

        That one holds headers of any size in memory, loses the body of a request that offers HTTP/2 (as Java's client
        does), and sends chunks to clients of HTTP/1.0.
        """

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            if len(self.connections) >= limit:
                crowded.log(most=limit)
                transport.set_protocol(asyncio.Protocol())  # nobody reads what still comes
                transport.write(_TOO_MANY)
                transport.close()
                return
            super().connection_made(transport)
            if self.client is not None:  # uvicorn compares it with the addresses of trusted proxies
                host, port = self.client
                self.client = (_IPV4_IN_IPV6.sub("", host), port)

        def _should_upgrade(self) -> bool:
            return False  # to HTTP/2 or WebSocket: the request is answered as if it had not offered that

        def on_response_complete(self) -> None:
            is_crowded = len(self.connections) > min(_CROWD, limit // 2)
            self.timeout_keep_alive = _CROWDED_KEEP_ALIVE_S if is_crowded else _KEEP_ALIVE_S
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            no_http.log()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun
                self.transport.write(_NOT_HTTP)
            self.transport.close()

    return HttpProtocol


def loop_exception_handler() -> Callable[[asyncio.AbstractEventLoop, dict[str, object]], None]:
    """A loop's exception handler that logs once a minute that connections cannot be accepted, not for each of them."""
    warning = ThrottledWarning("no file descriptors are left to accept connections")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if str(context.get("message", "")).startswith("socket.accept() out of system resource"):
            warning.log(error=str(context.get("exception")))
        else:
            loop.default_exception_handler(context)

    return handle
