"""Pure ASGI around every route: request id, access log, security headers, answers to our bugs; body limit.

After an early answer the rest of the body is read and thrown away for a moment, on purpose: if a server closes
at once, the kernel resets the connection and the client never sees the 413 or 503.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidspec_service.api.errors import error_response
from vidspec_service.api.limits.callers import OPEN_PATHS
from vidspec_service.errors import InvalidRequest, ServiceError, VideoTooLarge
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics, request_id_var

_log = logging.getLogger(__name__)
_AUTHORITY = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # absolute targets must be accepted, too
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBES = OPEN_PATHS | {"/metrics"}  # asked every few seconds
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_LOGGED_METHOD = 16  # characters
_LOGGED_PATH = 256  # characters; a client may send tens of thousands
_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
LINGER_S = 5.0
LINGER_BYTES = 64 * 1024 * 1024


class RequestContext:
    """The outermost layer: sets the request id, logs and counts the answer.

    Sets `root_path`, under which a proxy serves us, if any; the router strips it from paths where the proxy has not.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, settings: Settings) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = settings.access_log
        self._root_path = settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; only HTTP is handled here."""
        if self._root_path is not None:
            scope["root_path"] = self._root_path
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _AUTHORITY.sub("", scope["path"]) or "/"
        given = Headers(scope=scope).get("x-request-id", "")  # the client's own id where it is harmless to echo
        request_id_var.set(given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex)
        began = time.monotonic()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id_var.get()
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            self._record(scope, status, time.monotonic() - began)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        method = scope["method"] if scope["method"] in _METHODS else "other"  # clients may invent methods
        self._metrics.http_requests.labels(method, route, str(status)).inc()
        if self._access_log:
            level = logging.DEBUG if route in _PROBES and status == 200 else logging.INFO
            facts = {"method": scope["method"][:_LOGGED_METHOD], "path": scope["path"][:_LOGGED_PATH], "status": status}
            if caller := scope.get("state", {}).get("caller"):
                facts["caller"] = caller
            _log.log(level, "answered", extra={**facts, "duration_s": round(seconds, 4)})


class UncaughtErrors:
    """Answers uncaught exceptions, below the layer that lets pages of other sites read the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; only HTTP is answered here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:  # whatever gets here is a bug of ours, whose message clients must not see
            _log.exception("unhandled error")
            if not has_begun:
                await error_response(ServiceError("unhandled"))(scope, receive, send)


class BodyLimit:
    """Refuses a body over `max_bytes`: by its declared length, else as soon as more bytes have arrived.

    Also refuses a body with two declared ends: a proxy could take the other one, and the rest for a second request.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; only HTTP has a body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_read = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes, is_read
            message = await receive()
            num_bytes += len(message.get("body", b""))
            is_read = not message.get("more_body", False)
            return message

        async def receive_limited() -> Message:
            message = await receive_counted()
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        async def send_then_linger(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                MutableHeaders(scope=message)["connection"] = "close"  # else the server would read on without end
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or is_read:
                await send(message)
                return
            await send({**message, "more_body": True})
            most = num_bytes + max(self._max_bytes, LINGER_BYTES)
            with suppress(TimeoutError, asyncio.CancelledError):  # the answer is sent: a server that ends need not wait
                async with asyncio.timeout(LINGER_S):
                    while not is_read and num_bytes < most:
                        await receive_counted()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        if (refusal := self._refusal(headers)) is not None:
            await error_response(refusal)(scope, receive, send_then_linger)
        else:
            await self._app(scope, receive_limited, send_then_linger)

    def _refusal(self, headers: Headers) -> ServiceError | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            return InvalidRequest("Send Content-Length or Transfer-Encoding, not both.")
        return self._too_large() if int(headers.get("content-length", 0)) > self._max_bytes else None

    def _too_large(self) -> VideoTooLarge:
        return VideoTooLarge(
            f"The body is larger than {self._max_bytes:,} bytes, the limit that follows from "
            "VIDSPEC_MAX_UPLOAD_BYTES and VIDSPEC_MAX_JSON_BYTES.",
        )
