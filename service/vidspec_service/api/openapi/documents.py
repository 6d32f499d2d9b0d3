"""What /docs says beyond the routes' own types: bodies of two formats, examples, error answers."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from vidspec_service.api.errors import ErrorResponse
from vidspec_service.api.limits.callers import OPEN_PATHS
from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest, ChatCompletionResponse
from vidspec_service.api.schemas.completions import CompletionRequest, CompletionResponse
from vidspec_service.api.schemas.responses import ResponsesRequest
from vidspec_service.api.schemas.responses_output import ResponsesResponse
from vidspec_service.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from vidspec_service.api.schemas.video_chat import VIDEO_CHAT_DIALECT, VideoChatForm, VideoChatJson, VideoChatResponse
from vidspec_service.api.schemas.videos import VideoUploadForm, VideoUploadJson

FORMS: tuple[type[BaseModel], ...] = (VideoChatForm, VideoUploadForm)
BODIES: tuple[type[BaseModel], ...] = (
    *FORMS,
    VideoChatJson,
    VideoUploadJson,
    ChatCompletionRequest,
    ResponsesRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
"""Every request body."""

Responses = dict[int | str, dict[str, Any]]

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "A field is missing, malformed, contradictory or unknown, or the prompt does not fit the model.",
    401: "The server needs an API key, and the request has none or an invalid one.",
    404: "No such video or model.",
    408: "The body did not arrive in time.",
    413: "Too many videos, bytes, pixels or frames, or too long. The message names the limit and its setting.",
    415: "Not a video in a supported container and codec, or an unsupported Content-Type.",
    422: "No frame of the video can be decoded, or `video_url` could not be fetched.",
    429: "You exceeded your limit or share of requests. See Retry-After.",
    500: "The server failed. The message has the request id under which the log explains why.",
    503: "The server is full or shutting down, or the model is not loaded. See Retry-After.",
    504: "The request took longer than its time limit.",
}
# A reference by name: for the model itself FastAPI would make a validator for each status of each route.
_FASTAPI_ERROR_MODELS = ("HTTPValidationError", "ValidationError")
_ERROR_CONTENT = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
_NO_RETRY = {"X-Should-Retry": {"description": "`false`: a retry would fail again.", "schema": {"type": "string"}}}
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds to wait, a whole number.", "schema": {"type": "integer", "minimum": 1}}
}

# Tests validate these examples against the published schemas.
_EXAMPLES: dict[str, Any] = yaml.safe_load(
    (files("vidspec_service.api.openapi") / "examples.yaml").read_text(encoding="utf-8")
)
_REQUESTS: dict[str, dict[str, Any]] = _EXAMPLES["requests"]
_VIDEO_CHAT_RESPONSE: dict[str, Any] = _EXAMPLES["whole"] | _EXAMPLES["facts"]
_CHAT_COMPLETION: dict[str, Any] = _EXAMPLES["chat_completion"] | {"usage": _EXAMPLES["facts"]["usage"]}
_STREAM = VIDEO_CHAT_DIALECT.events({key: _VIDEO_CHAT_RESPONSE[key] for key in ("id", "created", "model")}, dict)
_EVENTS = "".join(
    [
        *_STREAM.on_text(0, "A red square", {}),
        *_STREAM.on_text(0, " moves left.", {}),
        *_STREAM.on_choice_end(0, "stop"),
        *_STREAM.on_end(_EXAMPLES["facts"]),
    ]
)


def _request_docs(
    description: str, responses: Responses, **contents: tuple[type[BaseModel], dict[str, Any]]
) -> dict[str, Any]:
    """Documents a route that reads its body itself; `form` and `json` each give the model and examples of the body."""
    kinds = {"form": "multipart/form-data", "json": "application/json"}
    body = {
        "required": True,
        "description": f"{description} Unknown fields are refused.",
        "content": {
            kinds[kind]: {"schema": {"$ref": _REF.format(model=model.__name__)}, "examples": shown}
            for kind, (model, shown) in contents.items()
        },
    }
    return {"responses": responses, "openapi_extra": {"requestBody": body}}


def error_responses(*statuses: int) -> Responses:
    """The documentation of these error statuses."""
    documented: Responses = {}
    for status in statuses:
        documented[status] = {"description": _ERRORS[status], "content": _ERROR_CONTENT}
        if status in (429, 503):
            documented[status]["headers"] = _RETRY_AFTER
        elif status in (500, 504):
            documented[status]["headers"] = _NO_RETRY
    return documented


def _response_docs(model: type[BaseModel], whole: dict[str, Any] | None = None, events: str | None = None) -> Responses:
    # Without a schema: some tools take one for that of the whole stream, others for that of each event.
    stream = {"example": events} if events else {}
    description = "The answer; with `stream`, as server-sent events."
    content = {"application/json": {"example": whole} if whole else {}, "text/event-stream": stream}
    return {200: {"model": model, "description": description, "content": content}, **error_responses(*_ERRORS)}


_OF_TEXT = error_responses(*(status for status in _ERRORS if status != 422))

VIDEO_CHAT = _request_docs(
    "A form with file parts, or JSON with data URLs; the video is optional.",
    _response_docs(VideoChatResponse, _VIDEO_CHAT_RESPONSE, _EVENTS),
    form=(VideoChatForm, _REQUESTS["video_chat_form"]),
    json=(VideoChatJson, _REQUESTS["video_chat"]),
)
CHAT_COMPLETION = _request_docs(
    "OpenAI's fields, and those of vidspec.",
    _response_docs(ChatCompletionResponse, _CHAT_COMPLETION),
    json=(ChatCompletionRequest, _REQUESTS["chat_completion"]),
)
RESPONSE = _request_docs(
    "OpenAI's newer fields, and those of vidspec.", _response_docs(ResponsesResponse), json=(ResponsesRequest, {})
)
COMPLETION = _request_docs(
    "OpenAI's older fields, and those of vidspec.",
    _response_docs(CompletionResponse),
    json=(CompletionRequest, _REQUESTS["completion"]),
)
INPUT_TOKENS = _request_docs("As for /v1/responses.", _OF_TEXT, json=(ResponsesRequest, {}))
TOKENIZE = _request_docs("As in vLLM.", _OF_TEXT, json=(TokenizeRequest, {}))
DETOKENIZE = _request_docs("As in vLLM.", _OF_TEXT, json=(DetokenizeRequest, {}))
VIDEO_UPLOAD = _request_docs(
    "A form with a file part, or JSON with a data URL.",
    error_responses(*(status for status in _ERRORS if status != 404)),
    form=(VideoUploadForm, {}),
    json=(VideoUploadJson, _REQUESTS["upload"]),
)
HEALTH: Responses = {
    200: {"description": "A request would be served.", "content": None},
    503: {"description": "A request would not be served; `/health/ready` says why."},
}
METRICS: Responses = {
    200: {"description": "All metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
    **error_responses(401),
}


def describe(app: FastAPI, *, asks_for_keys: bool) -> None:
    """Correct the document that FastAPI generates.

    Adds the bodies, which the routes parse themselves, and the keys; removes FastAPI's own 422, for which we send 400.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        models: tuple[type[BaseModel], ...] = (*BODIES, ErrorResponse)
        _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
        schemas = definitions["$defs"]
        for form in FORMS:
            properties = schemas[form.__name__]["properties"]
            schemas[form.__name__]["properties"] = {
                name: _as_form_field(name, schema) for name, schema in properties.items()
            }
        document["components"]["schemas"].update(schemas)
        for name in _FASTAPI_ERROR_MODELS:
            document["components"]["schemas"].pop(name, None)  # a FastAPI of another version may name them otherwise
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if _is_fastapi_error(operation["responses"].get("422")):
                    del operation["responses"]["422"]
                if asks_for_keys and path in OPEN_PATHS:
                    operation["security"] = []
        if asks_for_keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _is_fastapi_error(response: dict[str, Any] | None) -> bool:
    reference = {"$ref": _REF.format(model=_FASTAPI_ERROR_MODELS[0])}
    return response is not None and response["content"]["application/json"]["schema"] == reference


def _as_form_field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field in a form, which has no null, and in which a conversation is JSON text."""
    if name == "messages":
        return {"type": "string", "title": schema["title"], "description": schema["description"]}
    variants = [variant for variant in schema.get("anyOf", []) if variant.get("type") != "null"]
    if not variants:
        return schema
    # For "one or a list" a form takes the list: the part may be repeated.
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**variants[-1], **rest}
