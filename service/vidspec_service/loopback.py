"""How commands reach a server: one on this machine without the proxy of HTTP_PROXY or ALL_PROXY.

To a proxy, localhost is another machine.
"""

from __future__ import annotations

import re

import httpx

from vidspec_service.arguments import DEFAULT_PORT

PROXY_ERRORS = (ImportError, ValueError)
"""What httpx raises if a variable such as ALL_PROXY names a proxy of a kind that it cannot use."""


def server_url(address: str) -> str:
    """The URL of a server that may be named as HOST:PORT, or as HOST if it listens on the default port."""
    name = address.rstrip("/")
    if "://" in name:
        return name
    return f"http://{name}:{DEFAULT_PORT}" if re.fullmatch(r"[^:/]+|\[[^]]+\]", name) else f"http://{name}"


def shown(url: str | httpx.URL) -> str:
    """The URL for a message, which may end up in a log: without a user's name and password."""
    return re.sub(r"(?<=://)[^/]*@", "", str(url))


def listen_url(host: str, port: int) -> str:
    """The URL of a server that listens there, as a client on its machine can use it."""
    host = "localhost" if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine. Raises InvalidURL also for a port that httpx lets pass."""
    parsed = httpx.URL(url)
    if parsed.port is not None and parsed.port > 65535:
        raise httpx.InvalidURL(f"Invalid port: {parsed.port}")
    return parsed.host in ("localhost", "127.0.0.1", "::1")


def async_client(url: str, api_key: str | None, timeout: float | httpx.Timeout) -> httpx.AsyncClient:
    """A client of one server, with any number of connections. Raises InvalidURL and PROXY_ERRORS."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits()  # none
    transport = _transport(url, limits)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, transport=transport)


def _transport(url: str, limits: httpx.Limits) -> httpx.AsyncHTTPTransport | None:
    """Without the proxy, for a server on this machine; None for other servers."""
    return httpx.AsyncHTTPTransport(limits=limits) if is_loopback(url) else None
