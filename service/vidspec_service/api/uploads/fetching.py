"""Fetcher: a video from an address, for operators who allow hosts. What was checked is what is dialled."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager

import httpx

from vidspec_service.api.errors import VideoNotFetched
from vidspec_service.api.uploads.addresses import (
    IsPublic,
    Remote,
    Resolve,
    addresses_of,
    allowed_remote,
    is_public,
    resolve,
)
from vidspec_service.decoding.limits import over_limit
from vidspec_service.errors import InvalidRequest

MAX_REDIRECTS = 3
_CONNECT_TIMEOUT_S = 5.0
_HEADERS = {"accept": "video/*, application/octet-stream;q=0.5", "accept-encoding": "identity", "user-agent": "vidspec"}


class Fetcher:
    """Fetches from `hosts` only. A host is looked up once for each hop, all its addresses must be public, and the
    connection goes to one of them by number: a name that changes its mind between check and use gains nothing.

    `resolve`, `public` and `trust` are seams for tests, which have no public address.
    """

    def __init__(
        self,
        hosts: Collection[str],
        *,
        timeout_s: float,
        max_bytes: int,
        resolve: Resolve = resolve,
        public: IsPublic = is_public,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(hosts)
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._public = public
        self._trust = trust

    @asynccontextmanager
    async def opened(self, url: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The content of the video at `url` as it arrives, for the length of the block, which `timeout_s` bounds.

        Raises InvalidRequest for an address that may not be fetched, VideoNotFetched if its server gives no video
        in time, VideoTooLarge if it declares too many bytes (whoever reads counts those that come).
        """
        if not self._hosts:
            raise InvalidRequest(
                "This server does not fetch URLs; send the file itself, or a data URL as video.", param="video_url"
            )
        remote = allowed_remote(url, self._hosts)
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
        except (httpx.HTTPError, httpx.InvalidURL):  # its words may name addresses
            raise VideoNotFetched("The server of video_url does not answer as it should.", param="video_url") from None

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=self._trust or httpx.create_ssl_context(),
            trust_env=False,  # a proxy would look the name up again
            timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S),
            headers=_HEADERS,
        )

    async def _follow(self, client: httpx.AsyncClient, remote: Remote) -> httpx.Response:
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._get(client, remote)
            if not response.has_redirect_location:
                return response
            await response.aclose()
            remote = allowed_remote(remote.url.join(response.headers["location"]), self._hosts)
        raise VideoNotFetched(f"video_url redirects more than {MAX_REDIRECTS} times.", param="video_url")

    async def _get(self, client: httpx.AsyncClient, remote: Remote) -> httpx.Response:
        addresses = await addresses_of(remote, self._resolve, self._public)
        for address in addresses[:-1]:
            try:
                return await self._dial(client, remote, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._dial(client, remote, addresses[-1])

    async def _dial(self, client: httpx.AsyncClient, remote: Remote, address: str) -> httpx.Response:
        request = client.build_request(
            "GET",
            remote.url.copy_with(host=address, fragment=None),
            headers={"host": remote.url.netloc.decode()},
            extensions={"sni_hostname": remote.host},  # what the certificate must be for
        )
        return await client.send(request, stream=True, follow_redirects=False)

    def _check(self, response: httpx.Response) -> None:
        if response.status_code != httpx.codes.OK:
            raise VideoNotFetched(f"The server of video_url answers {response.status_code}.", param="video_url")
        if response.headers.get("content-encoding", "identity") != "identity":  # a small body may unpack to any size
            raise VideoNotFetched("The server of video_url sends compressed content.", param="video_url")
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            fact, limit = f"The video has {int(declared):,} bytes", f"{self._max_bytes:,} bytes"
            raise over_limit(fact, limit, "VIDSPEC_MAX_UPLOAD_BYTES", param="video_url")
