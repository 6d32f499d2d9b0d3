"""The examples that /docs shows, from `examples.yaml`; tests hold them to the published schemas."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import yaml

_SHOWN: dict[str, Any] = yaml.safe_load(
    (files("vidspec_service.api.openapi") / "examples.yaml").read_text(encoding="utf-8")
)
REQUESTS: dict[str, dict[str, Any]] = _SHOWN["requests"]
WHOLE: dict[str, Any] = _SHOWN["whole"] | _SHOWN["facts"]
CHAT_COMPLETION: dict[str, Any] = _SHOWN["chat_completion"] | {"usage": _SHOWN["facts"]["usage"]}


def _event(choices: list[dict[str, Any]], **facts: Any) -> str:
    head = {key: WHOLE[key] for key in ("id", "created", "model")}
    chunk = {**head, "object": "video.chat.completion.chunk", "choices": choices, **facts}
    return f"data: {json.dumps(chunk)}\n\n"


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]


EVENTS = "".join(
    [
        _event(_delta({"role": "assistant", "content": ""})),
        _event(_delta({"content": "A red square"})),
        _event(_delta({"content": " moves left."})),
        _event(_delta({}, "stop")),
        _event([], **_SHOWN["facts"]),
        "data: [DONE]\n\n",
    ]
)
