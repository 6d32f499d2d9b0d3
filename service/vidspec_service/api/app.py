"""create_app: every route, layer and error handler on injected collaborators. Imports no torch."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from vidspec_service import __version__
from vidspec_service.api import documents
from vidspec_service.api.admission import Admission
from vidspec_service.api.body_limit import BodyLimit
from vidspec_service.api.deps import Decoder, Services
from vidspec_service.api.guard import ClientGone
from vidspec_service.api.middleware import RequestContext
from vidspec_service.api.multipart import OVERHEAD_BYTES
from vidspec_service.api.problems import answer, answer_http, status_of
from vidspec_service.api.routes.health import health_router
from vidspec_service.api.routes.models import models_router
from vidspec_service.api.routes.video_chat import video_chat_router
from vidspec_service.engine.interface import Engine
from vidspec_service.errors import InvalidRequest, ServiceError
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

_log = logging.getLogger(__name__)

_CLIENT_GONE = 499  # nginx's; nobody receives it, the log and the metrics do
_DESCRIPTION = """Ask a video language model about a video. Parallel speculative decoding makes it fast and
leaves its text as it is. Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, with
string codes; every answer carries `X-Request-Id`."""


def create_app(
    settings: Settings,
    engine: Engine,
    decode_pool: Decoder,
    metrics: Metrics,
    *,
    admission: Admission | None = None,
    upload_dir: Path | None = None,
) -> FastAPI:
    """Wire the application. Engine and pool are started and closed by whoever made them.

    `admission` is the door that a server shuts before it ends; `upload_dir` holds uploads in use.
    """
    services = Services(
        settings=settings,
        engine=engine,
        decoder=decode_pool,
        metrics=metrics,
        admission=admission or new_admission(settings, metrics),
        upload_dir=upload_dir or settings.upload_dir or Path(tempfile.gettempdir()),
    )
    app = FastAPI(
        title="vidspec",
        version=__version__,
        description=_DESCRIPTION,
        redoc_url=None,
    )
    for router in (video_chat_router(services), models_router(services), health_router(services)):
        app.include_router(router)
    max_bytes = max(settings.max_upload_bytes + OVERHEAD_BYTES, settings.max_json_bytes)
    app.add_middleware(BodyLimit, max_bytes=max_bytes)
    app.add_middleware(RequestContext, metrics=metrics, access_log=settings.access_log)  # added last: outermost
    _handle_errors(app)
    documents.describe(app)
    return app


def new_admission(settings: Settings, metrics: Metrics) -> Admission:
    """The door of one server; whoever shuts it down keeps it."""
    return Admission(settings.max_running_requests + settings.max_queued_requests, metrics)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> Response:
        facts = {"code": error.code, "param": error.param}
        if status_of(error) == 500:  # the client is told nothing, so the log has to
            _log.error("request failed", extra={**facts, "reason": error.message}, exc_info=error)
        else:
            _log.info("request refused", extra=facts)
        return answer(error)

    @app.exception_handler(HTTPException)
    async def unroutable(_: Request, error: HTTPException) -> Response:
        return answer_http(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer(InvalidRequest(first["msg"], param=".".join(str(part) for part in first["loc"][1:])))

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)
