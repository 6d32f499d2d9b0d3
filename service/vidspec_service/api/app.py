"""create_app: every route, layer and error handler on injected collaborators. Imports no torch."""

from __future__ import annotations

import logging
from http import HTTPMethod
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from vidspec_service import __version__
from vidspec_service.api.errors import error_response, http_error_response, status_of
from vidspec_service.api.limits.callers import OPEN_PATHS, Authentication
from vidspec_service.api.middleware import BodyLimit, RequestContext, UncaughtErrors
from vidspec_service.api.openapi import documents
from vidspec_service.api.routes.chat import chat_router
from vidspec_service.api.routes.docs import docs_router
from vidspec_service.api.routes.health import health_router
from vidspec_service.api.routes.models import models_router
from vidspec_service.api.routes.page import page_files, page_router
from vidspec_service.api.routes.tokens import tokens_router
from vidspec_service.api.routes.videos import videos_router
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.form import OVERHEAD_BYTES
from vidspec_service.errors import CapacityError, InvalidRequest, ServiceError

_log = logging.getLogger(__name__)

_DESCRIPTION = """Ask a video language model about a video. Parallel speculative decoding makes it fast and
leaves its text as it is. Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, with
string codes; every response carries `X-Request-Id`, and an answer the `X-Seed` that gives the same text again."""
_CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST", "DELETE"],
    "allow_headers": ["*"],  # clients send their own (x-stainless-...); this is safe, as there are no cookies
    "expose_headers": ["x-request-id", "x-seed", "retry-after", "x-should-retry"],
}


def create_app(services: Services) -> FastAPI:
    """Wire the application. Whoever made `services` starts and closes what is in it."""
    settings, keys = services.settings, services.keys
    app = FastAPI(
        title="vidspec",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=None,  # FastAPI's own route would build the document for each call, which takes 0.2 s
        docs_url=None,
        redoc_url=None,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        redirect_slashes=False,  # a redirect would use the client's Host header, and http behind a TLS proxy
    )
    for make in (chat_router, videos_router, models_router, tokens_router, health_router):
        app.include_router(make(services))
    app.include_router(docs_router(lambda: app.openapi()))
    page = page_files()
    app.include_router(page_router(services, page))
    # Innermost first. BodyLimit wraps Authentication: a client without a key may still be sending its body, and
    # BodyLimit reads on for a moment, so that the client sees the 401.
    if keys:
        open_paths = OPEN_PATHS | page.keys() | ({"/metrics"} if settings.metrics_open else set())
        app.add_middleware(Authentication, keys=keys, open_paths=open_paths)
    max_bytes = max(settings.max_upload_bytes + OVERHEAD_BYTES, settings.max_json_bytes)
    app.add_middleware(BodyLimit, max_bytes=max_bytes)
    app.add_middleware(UncaughtErrors)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origins, **_CORS)
    app.add_middleware(RequestContext, metrics=services.metrics, settings=settings)
    _handle_errors(app)
    documents.describe(app, asks_for_keys=bool(keys))
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> Response:
        facts = {"code": error.code, "param": error.param}
        if status_of(error) == 500:  # the client is not told the reason, so the log must have it
            _log.error("request failed", extra={**facts, "reason": error.message})
        elif isinstance(error, CapacityError) and isinstance(error.__cause__, OSError):  # a full disk, for one
            _log.warning("request refused", extra={**facts, "reason": error.__cause__.strerror})
        else:
            _log.info("request refused", extra=facts)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def unroutable(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:  # Starlette names the methods of the first route of the path alone
            error.headers = {"Allow": ", ".join(sorted(_methods_of(app, request)))}
        if error.status_code == 404:
            error.detail = f"There is no route {request.scope['path'][:100]} here; /docs lists all."
        return http_error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return error_response(InvalidRequest(f"{param}: {first['msg']}.", param=param))

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=status_of(error))


def _methods_of(app: FastAPI, request: Request) -> set[str]:
    """All methods of the path that is asked for."""
    scopes = ({**request.scope, "method": str(method)} for method in HTTPMethod)
    return {
        scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in app.router.routes)
    }
