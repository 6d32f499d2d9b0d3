"""Addresses that may be fetched: parsed by one parser, looked up once, and never anything but the public internet."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import httpx

from vidspec_service.api.errors import VideoNotFetched
from vidspec_service.errors import InvalidRequest

HTTPS_PORT = 443
MAX_URL = 2048
Resolve = Callable[[str, int], Awaitable[list[str]]]
IsPublic = Callable[[str], bool]

_NOT_PUBLIC = tuple(  # though Python says so
    ipaddress.ip_network(network)
    for network in (
        "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32",  # carry another address, maybe a private one
        "fec0::/10",  # of a site: once what fc00::/7 is now (RFC 3879)
        "192.88.99.0/24",  # relays into 2002::/16 (RFC 7526)
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remote:
    """Where to go: a URL whose host is allowed."""

    url: httpx.URL
    host: str
    port: int


def allowed_remote(text: str | httpx.URL, hosts: Collection[str]) -> Remote:
    """The URL if it is https, names no user, and its `host` or `host:port` is in `hosts`; raises InvalidRequest."""
    if len(str(text)) > MAX_URL or any(not "!" <= char <= "~" or char == "\\" for char in str(text)):
        raise InvalidRequest(f"video_url must be a URL of at most {MAX_URL} ASCII characters.", param="video_url")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("video_url is not a URL.", param="video_url") from None
    if url.scheme != "https" or url.userinfo or not url.host:
        raise InvalidRequest("video_url must be an https address without a user name.", param="video_url")
    # As it stands in the address: `url.host` has no brackets, and puts letters in the place of xn--.
    named, default = url.netloc.decode(), f":{HTTPS_PORT}"
    if named.removesuffix(default) not in {entry.lower().removesuffix(default) for entry in hosts}:
        raise InvalidRequest("This server does not fetch from that host (VIDSPEC_VIDEO_URL_HOSTS).", param="video_url")
    return Remote(url, url.raw_host.decode(), url.port or HTTPS_PORT)


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, in the system's order of preference; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(text: str) -> bool:
    """Whether an address is one that any host on the internet can be reached at."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # with a scope (fe80::1%eth0), for one
        return False
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def addresses_of(remote: Remote, resolve: Resolve, is_public: IsPublic) -> list[str]:
    """Where to dial for `remote`. One address that is not public spoils all: no honest name has both."""
    try:
        found = await resolve(remote.host, remote.port)
    except (OSError, UnicodeError):
        raise VideoNotFetched("The host of video_url has no address.", param="video_url") from None
    if not found or not all(is_public(address) for address in found):
        raise InvalidRequest("The host of video_url is not on the public internet.", param="video_url")
    return found
