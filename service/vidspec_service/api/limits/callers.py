"""Who asks, and how often: API keys, requests a minute."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vidspec_service.api.errors import Unauthorized, answer

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
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
    """Pure ASGI: refuses whoever has no key, and puts the caller's name where `admission.caller_of` reads it."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event; paths that nobody serves are refused too."""
        if scope["type"] != "http" or _route_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        caller = self._keys.caller(Headers(scope=scope).get("authorization", ""))
        if caller is None:
            await answer(Unauthorized("Send a valid API key, as `Authorization: Bearer <key>`."))(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _route_path(scope: Scope) -> str:
    """As the router reads it: without the path of the proxy, if that has left it there."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RateLimit:
    """So many requests a minute for each caller, and as many at once after a quiet minute. Pure, on an injected clock.

    Callers are names of API keys, so there are never more of them than the operator has handed out.
    """

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left, and when that was

    def take(self, caller: str) -> float:
        """0 if the caller may go on, which costs a token; else the seconds until there is one."""
        now = self._now()
        tokens, then = self._buckets.get(caller, (float(self.per_minute), now))
        tokens = min(float(self.per_minute), tokens + (now - then) * self.per_minute / 60)
        if tokens < 1:
            self._buckets[caller] = (tokens, now)
            return (1 - tokens) * 60 / self.per_minute
        self._buckets[caller] = (tokens - 1, now)
        return 0.0
