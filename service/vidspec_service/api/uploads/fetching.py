"""Fetcher: downloads a video from a URL whose host the operator allows. Connects only to addresses it has checked.

URLs are parsed by one parser, hosts are looked up once for each hop, and only public addresses are allowed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

import httpx

from vidspec_service.api.errors import VideoNotFetched
from vidspec_service.api.schemas.fields import MAX_URL
from vidspec_service.decoding.clip import over_limit
from vidspec_service.errors import InvalidRequest
from vidspec_service.settings import Settings

HTTPS_PORT = 443
MAX_REDIRECTS = 3
_MAX_LOOKUPS = 8  # at a time; more wait, within the timeout of their fetch
_CONNECT_TIMEOUT_S = 5.0
_HEADERS = {"accept": "video/*, application/octet-stream;q=0.5", "accept-encoding": "identity", "user-agent": "vidspec"}
Resolve = Callable[[str, int], Awaitable[list[str]]]
IsPublic = Callable[[str], bool]

_NOT_PUBLIC = tuple(  # whatever Python's `is_global` says
    ipaddress.ip_network(network)
    for network in (
        "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32",  # contain another address, maybe a private one
        "fec0::/10",  # site-local: replaced by fc00::/7 (RFC 3879)
        "192.88.99.0/24",  # relays into 2002::/16 (RFC 7526)
        "3fff::/20",  # for documentation (RFC 9637)
    )
)  # fmt: skip


def allowed_url(text: str | httpx.URL, hosts: Collection[str]) -> httpx.URL:
    """The URL if it is https, names no user, and its `host` or `host:port` is in `hosts`; raises InvalidRequest."""
    if len(str(text)) > MAX_URL or any(not "!" <= char <= "~" or char == "\\" for char in str(text)):
        raise InvalidRequest(f"video_url must be a URL of at most {MAX_URL} ASCII characters.", param="video_url")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("video_url is not a URL.", param="video_url") from None
    if url.scheme != "https" or url.userinfo:
        raise InvalidRequest("video_url must be an https address without a user name.", param="video_url")
    # The host as written in the URL: `url.host` drops the brackets of IPv6, and decodes xn-- names or fails to.
    named, default = url.netloc.decode(), f":{HTTPS_PORT}"
    if named.removesuffix(default) not in {entry.lower().removesuffix(default) for entry in hosts}:
        raise InvalidRequest("This server does not fetch from that host (VIDSPEC_VIDEO_URL_HOSTS).", param="video_url")
    return url


class Resolver:
    """Looks names up in a few threads of its own, since nobody can stop a lookup that hangs.

    Others need the loop's threads, and a process that ends would wait for those of an executor.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[str, int, Future[list[Any]]]] = SimpleQueue()
        self._num_threads = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host, in the system's order of preference; raises OSError."""
        if self._num_threads < _MAX_LOOKUPS:
            Thread(target=self._look_up, name="lookup", daemon=True).start()
            self._num_threads += 1
        found: Future[list[Any]] = Future()
        self._asked.put((host, port, found))
        return list(dict.fromkeys(str(entry[4][0]) for entry in await asyncio.wrap_future(found)))

    def _look_up(self) -> None:
        while True:
            host, port, found = self._asked.get()
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
                except Exception as error:
                    found.set_exception(error)


def is_public(text: str) -> bool:
    """Whether an address belongs to the public internet."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # with a scope (fe80::1%eth0), for one
        return False
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


async def addresses_of(url: httpx.URL, resolve: Resolve, is_public: IsPublic) -> list[str]:
    """The addresses of `url`'s host. One that is not public makes all invalid: no honest name has both kinds."""
    try:
        found = await resolve(url.raw_host.decode(), url.port or HTTPS_PORT)
    except (OSError, UnicodeError):
        raise VideoNotFetched("The host name of video_url cannot be resolved.", param="video_url") from None
    if not found or not all(is_public(address) for address in found):
        raise InvalidRequest("The host of video_url is not on the public internet.", param="video_url")
    return found


class Fetcher:
    """Fetches from the hosts of the settings only.

    A host is looked up once for each hop, all its addresses must be public, and the connection goes to one of these
    addresses: a name that resolves to another one after the check (DNS rebinding) gains nothing.
    `resolve`, `public` and `trust` are parameters for tests, which have no public address.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        resolve: Resolve | None = None,
        public: IsPublic = is_public,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(settings.video_url_hosts or ())
        self._timeout_s = settings.video_url_timeout_s
        self._max_bytes = settings.max_upload_bytes
        self._resolve = resolve or Resolver()
        self._public = public
        self._trust = trust

    @asynccontextmanager
    async def opened(self, url: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yields the content of the video at `url` as it arrives. `video_url_timeout_s` bounds the whole block.

        Raises InvalidRequest for a URL that may not be fetched, VideoNotFetched if its server gives no video in time,
        VideoTooLarge if the server declares too many bytes (the reader counts the bytes that arrive).
        """
        if not self._hosts:
            told = "This server does not fetch URLs (VIDSPEC_VIDEO_URL_HOSTS); send the file or a data URL."
            raise InvalidRequest(told, param="video_url")
        remote = allowed_url(url, self._hosts)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client() as client,
                aclosing(await self._follow(client, remote)) as response,
            ):
                self._check(response)
                yield response.aiter_raw()
        except TimeoutError:
            raise VideoNotFetched(
                f"Fetching took longer than {self._timeout_s:g} s (VIDSPEC_VIDEO_URL_TIMEOUT_S).", param="video_url"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL):  # its message may contain addresses
            raise VideoNotFetched("The request to the server of video_url failed.", param="video_url") from None

    def _client(self) -> httpx.AsyncClient:
        self._trust = self._trust or httpx.create_ssl_context()  # once: nothing else runs in these 15 ms
        return httpx.AsyncClient(
            verify=self._trust,
            trust_env=False,  # a proxy would look the name up again
            timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S),
            headers=_HEADERS,
        )

    async def _follow(self, client: httpx.AsyncClient, remote: httpx.URL) -> httpx.Response:
        for _ in range(MAX_REDIRECTS + 1):
            try:
                response = await self._get(client, remote)
                if not response.has_redirect_location:
                    return response
                await response.aclose()
                remote = remote.join(response.headers["location"])
            except ValueError as error:  # in both calls httpx reads the new address; not all its errors are its own
                raise VideoNotFetched("video_url redirects to what is not a URL.", param="video_url") from error
            remote = allowed_url(remote, self._hosts)
        raise VideoNotFetched(f"video_url redirects more than {MAX_REDIRECTS} times.", param="video_url")

    async def _get(self, client: httpx.AsyncClient, remote: httpx.URL) -> httpx.Response:
        *first, last = await addresses_of(remote, self._resolve, self._public)
        for address in first:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await self._dial(client, remote, address)
        return await self._dial(client, remote, last)

    async def _dial(self, client: httpx.AsyncClient, remote: httpx.URL, address: str) -> httpx.Response:
        request = client.build_request(
            "GET",
            remote.copy_with(host=address, fragment=None),
            headers={"host": remote.netloc.decode()},
            extensions={"sni_hostname": remote.raw_host.decode()},  # what the certificate must be for
        )
        return await client.send(request, stream=True, follow_redirects=False)

    def _check(self, response: httpx.Response) -> None:
        if response.status_code != httpx.codes.OK:
            raise VideoNotFetched(
                f"The server of video_url answered with HTTP {response.status_code}.", param="video_url"
            )
        # a small body may unpack to any size; object stores repeat what was said at the upload, such as nothing at all
        if response.headers.get("content-encoding", "").lower() not in ("", "identity"):
            raise VideoNotFetched("The server of video_url sends compressed content.", param="video_url")
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            fact, limit = f"The video has {int(declared):,} bytes", f"{self._max_bytes:,} bytes"
            raise over_limit(fact, limit, "VIDSPEC_MAX_UPLOAD_BYTES", param="video_url")
