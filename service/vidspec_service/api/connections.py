"""How many connections there may be at a time: descriptors are left for what the server itself has to open.

Without a bound a flood of connections takes every descriptor. Then sound videos seem damaged, and asyncio, which goes
on accepting as often as its backlog is long, writes a hundred thousand lines a minute.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vidspec_service.api.store.clips import LEAST_BYTES
from vidspec_service.settings import Settings

BACKLOG = 128  # connections that are accepted in one go, before any of them can be closed
_PER_REQUEST = 4  # a video's file, a payload, a decode child's socket and its frames
_PER_CLIP = 2  # its frames' memory as it is mapped here, and to be given to the workers
_OWN = 128  # channels, logs, libraries
_LOG_PAUSE_S = 60.0
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

_log = logging.getLogger(__name__)


def connections_allowed(settings: Settings) -> int:
    """As many as descriptors are left for, once this process has as many of them as it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_requests = settings.max_running_requests + settings.max_queued_requests
    num_clips = settings.max_cached_frame_bytes // LEAST_BYTES
    # A payload has the memory of its clips once more.
    per_request = _PER_REQUEST + settings.max_videos_per_request * (_PER_CLIP + 1)
    reserved = _OWN + BACKLOG + num_requests * per_request + num_clips * _PER_CLIP
    return max(most - reserved, most // 4)


class Seldom:
    """A line of the log that is written once a minute, however often there is reason to."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._next_s = 0.0

    def warn(self, **facts: object) -> None:
        """Write it, if it was not written lately."""
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + _LOG_PAUSE_S
            _log.warning(self._event, extra=facts)


def protocol_for(most: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which answers a connection beyond `most` with a 503 before it has asked for anything."""
    line = Seldom("too many connections")

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # which class it is uvicorn finds out at import
        def connection_made(self, transport: asyncio.Transport) -> None:
            if len(self.connections) < most:
                super().connection_made(transport)
                return
            line.warn(most=most)
            transport.write(_REFUSAL)
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
    """For a loop's exceptions: asyncio's own line about each connection that it cannot accept becomes one a minute."""
    line = Seldom("no descriptors are left to accept connections with")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if str(context.get("message", "")).startswith("socket.accept() out of system resource"):
            line.warn(error=str(context.get("exception")))
        else:
            loop.default_exception_handler(context)

    return handle
