"""How commands reach a server. One on this machine is asked without the proxy of HTTP_PROXY or ALL_PROXY.

A proxy has another localhost.
"""

from __future__ import annotations

import httpx

BAD_PROXY = (ImportError, ValueError)
"""What httpx raises if a variable such as ALL_PROXY names a proxy of a kind that it cannot use."""


def url_of(address: str) -> str:
    """The URL of a server that may be named as HOST:PORT."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def is_this_machine(url: str) -> bool:
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")


def direct(url: str, limits: httpx.Limits) -> httpx.AsyncHTTPTransport | None:
    """The transport of a client that asks a server on this machine; None for other servers."""
    return httpx.AsyncHTTPTransport(limits=limits) if is_this_machine(url) else None
