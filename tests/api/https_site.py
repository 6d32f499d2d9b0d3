"""Site: a real local https server that tests count as public; Lookup: a resolver that returns what a test sets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import trustme

from tests.api.world import PATIENCE_S, World
from vidspec_service.api.uploads.fetching import Fetcher
from vidspec_service.settings import Settings

HOST = "videos.example"
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
AUTHORITY = trustme.CA()


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a complete response."""
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{head}connection: close\r\n\r\n".encode() + body


class Site:
    """An https server for one name; `heard` holds the request heads, `names` the SNI names that clients asked for."""

    def __init__(self, script: bytes | Answer, certified: str = HOST) -> None:
        self._script = script
        self._certified = certified
        self.heard: list[str] = []
        self.names: list[str | None] = []
        self.port = 0
        self._serving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        AUTHORITY.issue_cert(self._certified).configure_cert(context)
        context.sni_callback = lambda _, name, __: self.names.append(name)
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heard.append(head)
            if isinstance(self._script, bytes):
                writer.write(self._script)
                await writer.drain()
            else:
                await self._script(head.split()[1], writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Lookup:
    """A resolver that returns the given answers in turn, repeats the last, and records the hosts it is asked for."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers) or [["127.0.0.1"]]
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def is_called_public(address: str) -> bool:
    return address in ("127.0.0.1", "127.0.0.2")


def settings_for(site: Site, timeout_s: float = PATIENCE_S) -> Settings:
    """Settings of a server that fetches small videos from `site`."""
    return Settings(video_url_hosts=(f"{HOST}:{site.port}",), video_url_timeout_s=timeout_s, max_upload_bytes=1000)


def world_of(tmp_path: Path, site: Site, lookup: Lookup | None = None, timeout_s: float = PATIENCE_S) -> World:
    """A world that may fetch from `site`."""
    trust = ssl.create_default_context()
    AUTHORITY.configure_trust(trust)
    fetcher = Fetcher(settings_for(site, timeout_s), resolve=lookup or Lookup(), public=is_called_public, trust=trust)
    return World(tmp_path, fetcher=fetcher, max_upload_bytes=1000)


async def ask(world: World, url: str) -> httpx.Response:
    response = await world.ask(video=None, video_url=url)
    assert world.leftovers == []
    assert (world.admission.num_admitted, world.admission.num_bytes) == (0, 0)
    return response
