"""Pure ASGI, around every route: request id, access log, security headers, last resort for our bugs."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidspec_service.api.problems import answer
from vidspec_service.errors import ServiceError
from vidspec_service.telemetry import Metrics, request_id_var

_log = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})  # asked every few seconds
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_LOGGED_PATH = 256  # characters; a stranger may send tens of thousands
_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class RequestContext:
    """Outermost: names the request, logs and counts its answer, and answers what nobody else caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event; only HTTP is ours."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = request_id_var.set(_request_id(scope))
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
        except Exception:  # the last resort: whatever is raised here is our bug, and nobody else's to read
            _log.exception("unhandled error")
            if status == 0:
                await answer(ServiceError("unhandled"))(scope, receive, send_named)
        finally:
            self._record(scope, status, time.monotonic() - began)
            request_id_var.reset(token)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        method = scope["method"] if scope["method"] in _METHODS else "other"  # clients may invent methods
        self._metrics.http_answered(method, route, status)
        if self._access_log:
            level = logging.DEBUG if route in _PROBES and status == 200 else logging.INFO
            facts = {"method": scope["method"], "path": scope["path"][:_LOGGED_PATH], "status": status}
            if caller := scope.get("state", {}).get("caller"):
                facts["caller"] = caller
            _log.log(level, "answered", extra={**facts, "duration_s": round(seconds, 4)})


def _request_id(scope: Scope) -> str:
    """The client's own id where it is harmless to log and echo, a fresh one otherwise."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
