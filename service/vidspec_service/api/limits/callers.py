"""API keys, and how many requests per minute each may send."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vidspec_service.api.errors import Unauthorized, error_response

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
_NAME_DIGITS = 16  # of a key's digest: enough to be unique, and they reveal nothing of the key


class ApiKeys:
    """The accepted API keys, kept as digests. With an empty set, no key is asked for."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def caller(self, authorization: str) -> str | None:
        """The name of the key in an `Authorization: Bearer` header, or None. A name tells nothing about its key."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = None
        for known in self._digests:  # compares with all of them: the time must not reveal which one matched
            if hmac.compare_digest(known, digest):
                found = known
        return found.hex()[:_NAME_DIGITS] if found is not None and scheme.lower() == "bearer" else None


class Authentication:
    """Pure ASGI: refuses requests without a valid key, and puts the caller's name where `admission.caller_of` reads."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; unknown paths need a key, too."""
        if scope["type"] != "http" or _route_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        caller = self._keys.caller(Headers(scope=scope).get("authorization", ""))
        if caller is None:
            await error_response(Unauthorized("Send a valid API key, as `Authorization: Bearer <key>`."))(
                scope, receive, send
            )
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _route_path(scope: Scope) -> str:
    """The path as the router reads it: without the proxy's prefix, if the proxy has not stripped that."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RateLimit:
    """`per_minute` requests a minute for each caller, and as many at once after a quiet minute. The clock is injected.

    Callers are names of API keys, so there are never more of them than the operator has handed out.
    """

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left, and when that was

    def take(self, caller: str) -> float:
        """Takes a token and returns 0 if the caller has one; else returns the seconds until it has."""
        now = self._now()
        tokens, then = self._buckets.get(caller, (float(self.per_minute), now))
        tokens = min(float(self.per_minute), tokens + (now - then) * self.per_minute / 60)
        if tokens < 1:
            return (1 - tokens) * 60 / self.per_minute
        self._buckets[caller] = (tokens - 1, now)
        return 0.0
