"""GET /docs, /openapi.json: Swagger UI with the OpenAPI document. All files are local: it works behind a firewall."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse

from vidspec_service.api.openapi.documents import FORMS

_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_FAVICON = "data:,"  # none
# The page starts Swagger UI by a script inside it, and Swagger UI styles its elements one by one.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)

_FIRST = ("video", "prompt")  # shown before dozens of other fields
_FILLED_IN = {"prompt": "Describe the video."}
_A_FILE = {"type": "string", "format": "binary"}  # Swagger UI has no control for a list of files

# Swagger UI sends the empty fields of a form, too, but for the API an empty field is a given one.
_START = "SwaggerUIBundle({"
_WITHOUT_EMPTY_FIELDS = """
        requestInterceptor: (request) => {
            if (!(request.body instanceof FormData)) return request
            const given = new FormData()
            for (const [name, value] of request.body) if (value !== "") given.append(name, value)
            return Object.assign(request, {body: given})
        },"""


def docs_router(describe: Callable[[], dict[str, Any]]) -> APIRouter:
    """The routes of the page, its two files, the document that it shows, and the one that `describe` makes, once."""
    router = APIRouter(include_in_schema=False)
    folder = Path(str(resources.files("fastapi_swagger.resources")))

    @cache
    def documents() -> tuple[bytes, bytes]:
        described = describe()
        whole, to_try = (json.dumps(each, ensure_ascii=False).encode() for each in (described, _to_try_out(described)))
        return whole, to_try

    @router.get("/openapi.json")
    async def openapi() -> Response:
        whole, _ = await asyncio.to_thread(documents)
        return Response(whole, media_type="application/json")

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        root = request.scope.get("root_path", "")  # under which a proxy serves all of this
        page = get_swagger_ui_html(
            openapi_url=f"{root}/docs/openapi.json",
            title="vidspec",
            swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
            swagger_css_url=f"{root}/docs/swagger-ui.css",
            swagger_favicon_url=_FAVICON,
        )
        script = bytes(page.body).decode().replace(_START, _START + _WITHOUT_EMPTY_FIELDS, 1)
        return HTMLResponse(script, headers={"content-security-policy": _POLICY})

    @router.get("/docs/openapi.json")
    async def openapi_to_try() -> Response:
        _, to_try = await asyncio.to_thread(documents)
        return Response(to_try, media_type="application/json")

    @router.get("/docs/{name}")
    async def asset(name: str) -> Response:
        if name not in _ASSETS:
            raise HTTPException(404, "Not Found")
        return FileResponse(folder / name, media_type=_ASSETS[name], headers={"cache-control": "max-age=86400"})

    return router


def _to_try_out(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of the document in which what "Try it out" fills in can be sent as it is.

    Swagger UI puts a sample into every field of a form, so fields get an empty sample, which is then not sent.
    Examples that are cut short for the reader are made complete.
    """
    frame = base64.b64encode((resources.files("vidspec_service.api.openapi") / "frame.jpg").read_bytes()).decode()
    whole = {
        "data:video/mp4;base64,AAAAIGZ0eXBpc29t...": f"data:video/jpeg;base64,{frame}",
        "data:image/png;base64,iVBORw0KGgoA...": f"data:image/jpeg;base64,{frame}",
        "/9j/4AAQ...": frame,
    }
    text = json.dumps(document)
    for cut, complete in whole.items():
        text = text.replace(cut, complete)
    shown: dict[str, Any] = json.loads(text)
    for model in FORMS:
        form = shown["components"]["schemas"][model.__name__]
        fields = sorted(form["properties"].items(), key=lambda item: item[0] not in _FIRST)
        form["properties"] = {field: _empty(field, schema) for field, schema in fields}
    return shown


def _empty(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in schema.items() if key != "default"}
    if field == "video":
        return {**_A_FILE, "description": schema["description"]}
    if rest.get("type") in (None, "object"):  # JSON text in a form
        return {"type": "string", "description": schema.get("description", ""), "example": ""}
    return {**rest, "example": [] if rest.get("type") == "array" else _FILLED_IN.get(field, "")}
