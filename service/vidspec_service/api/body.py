"""Reads a request body, form or JSON, into validated fields, and the video in it into the request's intake."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from vidspec_service.api import openai_parts, openai_schemas
from vidspec_service.api.intake import Intake
from vidspec_service.api.json_structure import check_structure
from vidspec_service.api.multipart import MultipartReader, PartHead
from vidspec_service.api.schemas import Message, VideoChat
from vidspec_service.errors import InvalidRequest, VideoTooLarge

_FORM = "multipart/form-data"
_JSON = "application/json"
_WORDS = frozenset(
    name
    for model in (
        VideoChat, Message, openai_schemas.ChatCompletion, openai_schemas.ChatTurn, openai_schemas.StreamOptions,
        openai_parts.TextPart, openai_parts.VideoUrlPart, openai_parts.VideoUrl, openai_parts.InputVideoPart,
        openai_parts.InputVideo, openai_parts.ImageUrlPart, openai_parts.ImageUrl, openai_parts.FilePart,
        openai_parts.FileRef,
    )
    for name in model.model_fields
)  # fmt: skip
_PARTS = "Parts may be text, video_url, input_video, image_url or file; this server takes no audio and no tools"

F = TypeVar("F", bound=BaseModel)
J = TypeVar("J", bound=BaseModel)


class BodyReader:
    """Reads one request's body; raises the RequestError that says what is wrong with it."""

    def __init__(self, request: Request, intake: Intake, max_json_bytes: int) -> None:
        self._request = request
        self._intake = intake
        self._max_json_bytes = max_json_bytes
        self._content_type = request.headers.get("content-type", "")

    async def form_or_json(self, form: type[F], json: type[J]) -> F | J:
        """The fields of either kind of body. A form's file is in the intake then; JSON still holds its data URL."""
        if self._kind == _FORM:
            return await self._form(form)
        if self._kind == _JSON:
            return await self._json(json)
        raise HTTPException(415, f"Content-Type must be {_FORM} or {_JSON}.")

    async def json(self, model: type[J]) -> J:
        """The fields of a JSON body."""
        if self._kind != _JSON:
            raise HTTPException(415, f"Content-Type must be {_JSON}.")
        return await self._json(model)

    @property
    def _kind(self) -> str:
        return self._content_type.partition(";")[0].strip().lower()

    async def _form(self, model: type[F]) -> F:
        reader = MultipartReader(self._stream(), self._content_type)
        fields: dict[str, Any] = {}
        while (part := await reader.next_part()) is not None:
            _check_part(part, fields, model)
            if part.name == "video":
                await self._intake.store(reader.chunks())
                fields["video"] = self._intake.file.path
            elif part.name == "stop":
                fields.setdefault("stop", []).append(await reader.text("stop"))
            elif part.name == "messages":
                fields["messages"] = _parse_json_field("messages", await reader.text("messages"))
            else:
                fields[part.name] = await reader.text(part.name)
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            raise refusal(error, model) from None

    async def _json(self, model: type[J]) -> J:
        most = self._max_json_bytes
        body = bytearray()
        async for chunk in self._stream():
            body += chunk
            if len(body) > most:
                raise VideoTooLarge(f"A JSON body may have {most:,} bytes (VIDSPEC_MAX_JSON_BYTES); send a form.")
        try:  # in a thread: megabytes of base64 must not hold up everybody's tokens
            return await asyncio.to_thread(_validated, model, body)
        except ValidationError as error:
            raise refusal(error, model) from None

    async def _stream(self) -> AsyncIterator[bytes]:
        """The body, held against the budget of all uploads: by its declared length before a byte of it is read."""
        place = self._intake.place
        place.hold_bytes(int(self._request.headers.get("content-length", 0)))
        num_bytes = 0
        async for chunk in self._request.stream():
            num_bytes += len(chunk)
            place.hold_bytes(num_bytes)
            yield chunk


def _validated(model: type[J], body: bytearray) -> J:
    check_structure(body)
    return model.model_validate_json(body, strict=True)


def refusal(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """The first thing wrong, in one sentence that names the field and never repeats its value."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return _unknown_field(location[-1], ".".join([*_meant(location[:-1]), location[-1]]), model)
    param = ".".join(_meant(location)) or None
    message = _PARTS if problem["type"] == "union_tag_invalid" else problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}." if param else f"{message}.", param=param)


def _meant(location: list[str]) -> list[str]:
    """Pydantic names the branch of a union, too; only fields and places in lists mean something to a client."""
    words = [part for part in location if part in _WORDS or part.isdigit()]
    return [word for index, word in enumerate(words) if index == 0 or word != words[index - 1]]


def _check_part(part: PartHead, seen: dict[str, Any], model: type[BaseModel]) -> None:
    if part.name not in model.model_fields:
        raise _unknown_field(part.name, part.name, model)
    if part.name in seen and part.name != "stop":
        raise InvalidRequest(f"{part.name} is given twice.", param=part.name)
    if part.name == "video" and not part.is_file:
        raise InvalidRequest("video must be a file part, as in curl's -F video=@clip.mp4.", param="video")


def _unknown_field(name: str, param: str, model: type[BaseModel]) -> InvalidRequest:
    known = set(model.model_fields) if "." not in param else _WORDS - {name}  # a known name in the wrong place
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"Unknown field {name[:64]!r}.{hint}", param=param[:64])


def _parse_json_field(name: str, text: str) -> object:
    check_structure(text.encode())
    try:
        return pydantic_core.from_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is not valid JSON.", param=name) from error
