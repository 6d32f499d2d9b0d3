"""Runs the application under uvicorn, and ends it in order.

First SIGTERM, SIGINT or SIGHUP: readiness turns red, nothing new is admitted, running requests go on for
`drain_timeout_s`, then each gets an error (an event in a stream, a 503 otherwise), and `serve` returns.
A second signal skips the waits. uvicorn's own handling would stop listening at once: probes and clients would
see a refused connection instead of a 503.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial

import uvicorn
from fastapi import FastAPI

from vidspec_service.api.app import create_app
from vidspec_service.api.connections import (
    BACKLOG,
    bounded_protocol,
    loop_exception_handler,
    max_connections,
)
from vidspec_service.api.limits.admission import Admission, FairThreads
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.api.services import Remotes, Services, build_services
from vidspec_service.api.store.clip_cache import Decode
from vidspec_service.api.uploads.folder import upload_folder
from vidspec_service.end_signals import obeyed_signals
from vidspec_service.engine.frontend.interface import Engine
from vidspec_service.errors import ConfigError
from vidspec_service.loopback import listen_url
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

_log = logging.getLogger(__name__)
_NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as asyncio has by default
_EXPIRY_CHECK_S = 30.0
_FINAL_WRITE_TIMEOUT_S = 2.0  # for error events to be written and connections to be closed
_LAST_WRITES_S = 0.1  # the same after a second signal
_UNREAD_S = 60.0  # a client that takes nothing of its answer for so long counts as gone: we would hold it for ever


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Shutdown:
    """What happens after a signal, in order."""

    def __init__(self, server: uvicorn.Server, admission: Admission, drain_timeout_s: float) -> None:
        self._server = server
        self._admission = admission
        self._drain_timeout_s = drain_timeout_s
        self._drain: asyncio.Task[None] | None = None

    def signalled(self) -> None:
        """Drain at the first call, stop at the next."""
        if self._drain is None:
            self._admission.start_draining()
            self._drain = asyncio.create_task(self._drain_then_exit())
            return
        _log.warning("second signal: stopping now")
        self._admission.close()
        self._server.force_exit = True
        self._server.should_exit = True
        # From Python 3.12 on, uvicorn waits for clients that read nothing even then.
        asyncio.get_running_loop().call_later(_LAST_WRITES_S, self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _drain_then_exit(self) -> None:
        _log.info("draining", extra={"num_requests": self._admission.num_admitted})
        if not await self._is_idle_within(self._drain_timeout_s):
            _log.warning("drain timed out", extra={"num_requests": self._admission.num_admitted})
            self._admission.close()
            await self._is_idle_within(_FINAL_WRITE_TIMEOUT_S)
        self._server.should_exit = True

    async def _is_idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._admission.idle.wait(), seconds)
        return self._admission.idle.is_set()


async def serve(
    settings: Settings,
    engine: Engine,
    decode: Decode,
    metrics: Metrics,
    listener: socket.socket,
    remotes: Remotes,
) -> None:
    """Serve on a bound socket until a signal has ended the server."""
    async with running_app(settings, engine, decode, metrics, remotes) as (app, services):
        # As vLLM does: without this, the collector visits all imported objects and stops every stream for 40 to 60 ms.
        gc.collect()
        gc.freeze()
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # else whoever sends what is no HTTP could fill the log
            access_log=False,
            server_header=False,
            http=bounded_protocol(max_connections(settings)),
            ws="none",  # else uvicorn imports a library for it if there is one
            backlog=BACKLOG,
            lifespan="off",
            timeout_graceful_shutdown=int(_FINAL_WRITE_TIMEOUT_S),
        )
        server = _Server(config)
        if not services.keys and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            _log.warning("no API keys are set: anyone who can reach this address can use the server")
        asyncio.get_running_loop().set_exception_handler(loop_exception_handler())
        shutdown = Shutdown(server, services.admission, settings.drain_timeout_s)
        for number in obeyed_signals():
            # Until the loop closes: a signal's default action would end the process in the middle of its cleanup.
            asyncio.get_running_loop().add_signal_handler(number, shutdown.signalled)
        await asyncio.create_task(server.serve(sockets=[listener]))  # uvicorn's ticks wake only this task


@asynccontextmanager
async def running_app(
    settings: Settings, engine: Engine, decode: Decode, metrics: Metrics, remotes: Remotes
) -> AsyncIterator[tuple[FastAPI, Services]]:
    """The application, for any server, with its background tasks; cleans up at the end."""
    asyncio.get_running_loop().set_default_executor(FairThreads(_NUM_THREADS))
    with upload_folder(settings.upload_dir) as upload_dir:
        services = build_services(settings, engine, decode, metrics, upload_dir, remotes)
        with closing(services.grammars):
            services.grammars.start()
            expiring = repeatedly(partial(_expire, services), min(_EXPIRY_CHECK_S, settings.video_ttl_s))
            # Rarely: it lists all videos of a shared store, which may answer late or never.
            sweeping = repeatedly(services.videos.sweep, max(_EXPIRY_CHECK_S, settings.video_ttl_s / 10))
            async with background_task(expiring), background_task(sweeping):
                yield create_app(services), services


def bind(settings: Settings) -> socket.socket:
    """Bind the address without listening yet; raises ConfigError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit this option; asyncio sets it only on sockets whose `proto` is TCP. Without it
            # every small write after the first waits some 40 ms for the client's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNREAD_S))  # inherited likewise
            sock.bind((settings.host, settings.port))
            stack.pop_all()
            return sock
    except (OSError, TypeError) as error:  # TypeError: of a name that no DNS could have
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot bind {settings.host}:{settings.port}: {why}; choose another --port or --host"
        ) from error


def listen(sock: socket.socket) -> None:
    """Listen on a bound socket: connections wait there until uvicorn takes them. Raises ConfigError."""
    try:
        sock.listen()
    except OSError as error:  # of two servers that load at the same time, both can bind, but only one can listen
        raise ConfigError(f"cannot listen at {listen_url(*sock.getsockname()[:2])}: {error.strerror}") from error


async def _expire(services: Services) -> None:
    """Delete expired videos and frames here, also while no request arrives."""
    services.videos.expire()
    services.clips.expire()


async def repeatedly(work: Callable[[], Awaitable[None]], interval_s: float) -> None:
    """Do the work once per interval; what it raises is logged, since the next time may go better."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:
            _log.exception("what is done every %g s failed", interval_s)
