"""Servers on this machine are asked without the proxy of HTTP_PROXY or ALL_PROXY, which has another localhost."""

from __future__ import annotations

import httpx


def is_this_machine(url: str) -> bool:
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")


def direct(url: str, limits: httpx.Limits) -> httpx.AsyncHTTPTransport | None:
    """The transport of a client that asks a server on this machine; None for other servers."""
    return httpx.AsyncHTTPTransport(limits=limits) if is_this_machine(url) else None
