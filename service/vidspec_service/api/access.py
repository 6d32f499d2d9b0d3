"""Who may ask: API keys, compared in constant time, before any route but the two health checks is reached."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from vidspec_service.api.problems import Unauthorized, answer

ANYONE = ""  # the caller where no keys are asked for
OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
_NAME_DIGITS = 16  # of the digest; enough never to meet, and nothing of the key


class ApiKeys:
    """The keys that are accepted, kept as digests. An empty set asks nobody for one."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def caller(self, authorization: str) -> str | None:
        """The name of the key in an `Authorization: Bearer` header, or None. A name tells nothing about its key."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = None
        for known in self._digests:  # all of them, always: the time says nothing about which one, or how nearly
            if hmac.compare_digest(known, digest):
                found = known
        return found.hex()[:_NAME_DIGITS] if found is not None and scheme.lower() == "bearer" else None


class Authentication:
    """Pure ASGI: refuses whoever has no key, and tells the routes who asks."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event; paths that nobody serves are refused too."""
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        caller = self._keys.caller(Headers(scope=scope).get("authorization", ""))
        if caller is None:
            await answer(Unauthorized("Send a valid API key, as `Authorization: Bearer <key>`."))(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> str:
    """Who asks: the name of a key, or ANYONE."""
    caller: str = getattr(request.state, "caller", ANYONE)
    return caller
