"""The OpenAPI document as /docs shows it: what "Try it out" fills in can be sent as it is.

Swagger UI puts a sample into every field of a form, so each is given an empty one, which is then not sent; and examples
that are cut short for the reader's sake are made whole.
"""

from __future__ import annotations

import base64
import json
from copy import deepcopy
from importlib.resources import files
from typing import Any

_FORMS = ("VideoChatForm", "VideoUploadForm")
_FIRST = ("video", "prompt")  # of dozens
_FILLED_IN = {"prompt": "Describe the video."}
_A_FILE = {"type": "string", "format": "binary"}  # a list of them has no control of its own


def to_try_out(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of the document for Swagger UI; that at /openapi.json stays as the routes are."""
    frame = base64.b64encode((files("vidspec_service.api.openapi") / "frame.jpg").read_bytes()).decode()
    whole = {
        "data:video/mp4;base64,AAAAIGZ0eXBpc29t...": f"data:video/jpeg;base64,{frame}",
        "data:image/png;base64,iVBORw0KGgoA...": f"data:image/jpeg;base64,{frame}",
        "/9j/4AAQ...": frame,
    }
    text = json.dumps(document)
    for cut, complete in whole.items():
        text = text.replace(cut, complete)
    shown: dict[str, Any] = json.loads(text)
    for name in _FORMS:
        form = shown["components"]["schemas"][name]
        fields = sorted(form["properties"].items(), key=lambda item: item[0] not in _FIRST)
        form["properties"] = {field: _empty(field, schema) for field, schema in fields}
    return shown


def _empty(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in deepcopy(schema).items() if key != "default"}
    if field == "video":
        return {**_A_FILE, "description": schema["description"]}
    if "$ref" in rest or rest.get("type") in (None, "object"):  # JSON text in a form
        return {"type": "string", "description": schema.get("description", ""), "example": ""}
    return {**rest, "example": [] if rest.get("type") == "array" else _FILLED_IN.get(field, "")}
