"""The table from error class to HTTP status, and the OpenAI-shaped body of every error answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from vidspec_service.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineDead,
    NotFound,
    RequestError,
    ServiceError,
    VideoError,
    VideoTooLarge,
    VideoUnsupported,
)
from vidspec_service.telemetry import request_id_var


class UploadTimeout(RequestError):
    """The request body did not arrive in time; only HTTP knows this error."""

    code = "upload_timeout"


class Unauthorized(RequestError):
    """No API key, or one that is not known; only HTTP knows callers."""

    code = "invalid_api_key"


class TooManyRequests(CapacityError):
    """This caller's own limit, however idle the server is."""

    code = "rate_limited"


class ModelNotFound(NotFound):
    """The request names another model than the one that is served."""

    code = "model_not_found"


def check_model_name(model: str | None, served: Sequence[str]) -> None:
    """Raises ModelNotFound unless `model` is None or one of the served model's names."""
    if model not in (None, *served):
        raise ModelNotFound(f"This server serves only the model {served[0]!r}.", param="model")


class VideoNotFetched(VideoError):
    """The server that `video_url` names did not give a video."""

    code = "video_not_fetched"


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """Every error answer, and the error event of a stream."""

    error: ErrorInfo


STATUS: Mapping[type[ServiceError], int] = {
    RequestError: 400,
    Unauthorized: 401,
    NotFound: 404,
    UploadTimeout: 408,
    VideoTooLarge: 413,
    VideoUnsupported: 415,
    VideoError: 422,
    TooManyRequests: 429,
    CapacityError: 503,
    EngineDead: 503,
    DeadlineExceeded: 504,
    ServiceError: 500,
}
_CLIENT_GONE = 499  # nginx's status for it; log, metrics and traces show it, no client receives it
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
# A retry would fail again, at full cost. OpenAI's clients obey this header; without it they retry twice.
_NO_RETRY = {"X-Should-Retry": "false"}
_RETRY_AFTER_DEAD_S = 10  # about what an orchestrator needs to replace the process


def status_of(error: BaseException) -> int:
    """The status of the error's nearest class that is in the table; 500 for what is a bug of ours."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, ClientDisconnect):
        return _CLIENT_GONE
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def error_body(error: ServiceError) -> dict[str, Any]:
    """What a client may read. For failures of ours that is only the request id, under which the log has the reason."""
    message = error.message
    if isinstance(error, EngineDead):
        message = f"The model is not available now (request id {request_id_var.get()})."
    elif status_of(error) == 500:
        message = f"The server failed to answer (request id {request_id_var.get()})."
    return _body(status_of(error), message, error.code, error.param)


def error_response(error: ServiceError) -> JSONResponse:
    """The HTTP response for an error that is known before the response has begun."""
    return JSONResponse(error_body(error), status_of(error), headers=_error_headers(error))


def http_error_response(error: HTTPException) -> JSONResponse:
    """Unknown routes, wrong methods and wrong content types, in the same shape as every other error."""
    code = _HTTP_CODES.get(error.status_code, "invalid_request")
    return JSONResponse(_body(error.status_code, error.detail, code, None), error.status_code, headers=error.headers)


def _body(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error_headers(error: ServiceError) -> dict[str, str]:
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, CapacityError):
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    if isinstance(error, EngineDead):
        return {"Retry-After": str(_RETRY_AFTER_DEAD_S)}
    return _NO_RETRY if status_of(error) in (500, 504) else {}
