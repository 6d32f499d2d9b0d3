"""What /docs says beyond the routes' own types: bodies of two formats, examples, error answers."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from vidspec_service.api.answers import Completion, ErrorBody
from vidspec_service.api.schemas import VideoChatForm, VideoChatJson

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "A field is missing, malformed, contradictory or unknown, or the prompt does not fit the model.",
    404: "No such video.",
    408: "The body did not arrive in time.",
    413: "Over a limit: bytes, duration, pixels or frames. The message names the limit and its setting.",
    415: "Not a video in a container and codec that is decoded here, or another Content-Type.",
    422: "A video, but no frame can be had from it.",
    500: "Our fault. The message carries the request id under which the log explains it.",
    503: "Every place is taken, the server is shutting down or the model is not loaded. See Retry-After.",
    504: "The request took longer than its time limit.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}}

_FACTS: dict[str, Any] = {
    "usage": {
        "prompt_tokens": 180,
        "completion_tokens": 24,
        "total_tokens": 204,
        "prompt_tokens_details": {"video_tokens": 144, "cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 18, "rejected_prediction_tokens": 3},
    },
    "video": {
        "id": "video-1f0c5d5a9ce84f7d3a1b0e6c2d4f8a90",
        "duration_s": 4.0,
        "num_frames": 4,
        "timestamps_s": [0.0, 1.0, 2.0, 3.0],
        "warnings": [],
    },
    "speculation": {
        "mode": "parallel",
        "acceptance_rate": 0.857143,
        "mean_accepted_tokens": 3.0,
        "draft_video_tokens": 14,
    },
    "timings": {
        "queue_s": 0.002,
        "decode_s": 0.041,
        "prefill_s": 0.088,
        "time_to_first_token_s": 0.131,
        "time_per_output_token_s": 0.004,
    },
}
_NAMED = {"id": "vchat-5b2f8a0c9d3e4f6071829304", "created": 1795000000, "model": "vidspec-bundled"}
_WHOLE = {
    **_NAMED,
    "object": "video.chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A red square moves left."},
            "finish_reason": "stop",
        }
    ],
    **_FACTS,
}


def _event(choices: list[dict[str, Any]], **facts: Any) -> str:
    chunk = {**_NAMED, "object": "video.chat.completion.chunk", "choices": choices, **facts}
    return f"data: {json.dumps(chunk)}\n\n"


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]


_EVENTS = "".join(
    [
        _event(_delta({"role": "assistant", "content": ""})),
        _event(_delta({"content": "A red square"})),
        _event(_delta({"content": " moves left."})),
        _event(_delta({}, "stop")),
        _event([], **_FACTS),
        "data: [DONE]\n\n",
    ]
)

VIDEO_CHAT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A form with a file part, or JSON with a data URL. Unknown fields are refused.",
        "content": {
            "multipart/form-data": {
                "schema": {"$ref": _REF.format(model="VideoChatForm")},
                "examples": {
                    "ask": {
                        "summary": "curl -F video=@clip.mp4 -F prompt=...",
                        "value": {"prompt": "Describe the video.", "stream": "true", "num_frames": "8"},
                    }
                },
            },
            "application/json": {
                "schema": {"$ref": _REF.format(model="VideoChatJson")},
                "examples": {
                    "prompt": {
                        "summary": "One question",
                        "value": {
                            "video": "data:video/mp4;base64,AAAAIGZ0eXBpc29t...",
                            "prompt": "Describe the video.",
                            "max_tokens": 64,
                        },
                    },
                    "messages": {
                        "summary": "A conversation",
                        "value": {
                            "video": "data:video/mp4;base64,AAAAIGZ0eXBpc29t...",
                            "messages": [
                                {"role": "user", "content": "What moves?"},
                                {"role": "assistant", "content": "A red square."},
                                {"role": "user", "content": "Where to?"},
                            ],
                            "temperature": 0.7,
                            "seed": 7,
                            "stream": True,
                        },
                    },
                },
            },
        },
    }
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of these error statuses."""
    documented: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        documented[status] = {"model": ErrorBody, "description": _ERRORS[status]}
        if status == 503:
            documented[status]["headers"] = _RETRY_AFTER
    return documented


VIDEO_CHAT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Completion,
        "description": "The answer; with `stream`, as server-sent events that end with `data: [DONE]`.",
        "content": {
            "application/json": {"example": _WHOLE},
            "text/event-stream": {"schema": {"type": "string"}, "example": _EVENTS},
        },
    },
    **problems(*_ERRORS),
}


def describe(app: FastAPI) -> None:
    """Add the two bodies, which the routes parse themselves, to the document that FastAPI generates."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, definitions = models_json_schema(
            [(VideoChatForm, "validation"), (VideoChatJson, "validation")], ref_template=_REF
        )
        schemas = definitions["$defs"]
        schemas["VideoChatForm"]["properties"] = {
            name: _as_form_field(name, schema) for name, schema in schemas["VideoChatForm"]["properties"].items()
        }
        document["components"]["schemas"].update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _as_form_field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A form knows no null, and a conversation travels in it as JSON text."""
    if name == "messages":
        return {"type": "string", "title": schema["title"], "description": schema["description"]}
    variants = [variant for variant in schema.get("anyOf", []) if variant.get("type") != "null"]
    if not variants:
        return schema
    # Of "one or a list" a form has the list: the part is repeated.
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**variants[-1], **rest}
