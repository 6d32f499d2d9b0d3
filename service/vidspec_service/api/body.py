"""Reads a request body, form or JSON, into validated fields and one private file that is gone afterwards."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from vidspec_service.api.engine_request import check_available
from vidspec_service.api.multipart import MultipartReader, PartHead
from vidspec_service.api.schemas import Message, VideoChat, VideoChatForm, VideoChatJson
from vidspec_service.decoding.source import decode_data_url, write_upload
from vidspec_service.errors import InvalidRequest, NotFound, VideoTooLarge
from vidspec_service.settings import Settings

_NAMES = frozenset(VideoChat.model_fields) | frozenset(Message.model_fields)


@dataclass(frozen=True, slots=True)
class Upload:
    """A video on our disk, under a name of ours."""

    path: Path
    num_bytes: int
    content_id: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One valid request."""

    chat: VideoChat
    upload: Upload


class BodyReader:
    """Reads one request. Enter it before reading; leaving it deletes the file."""

    def __init__(self, request: Request, settings: Settings, upload_dir: Path) -> None:
        self._request = request
        self._settings = settings
        self._upload_dir = upload_dir
        self._upload: Upload | None = None

    @contextmanager
    def cleaning_up(self) -> Iterator[BodyReader]:
        """Delete the file at the end of the block, whatever happened in it."""
        try:
            yield self
        finally:
            if self._upload is not None:
                self._upload.path.unlink(missing_ok=True)

    async def read(self) -> Asked:
        """The whole body, or the RequestError that says what is wrong with it."""
        content_type = self._request.headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            chat = await self._read_form(content_type)
        elif kind == "application/json":
            chat = await self._read_json()
        else:
            raise HTTPException(415, "Content-Type must be multipart/form-data or application/json.")
        check_available(chat)
        if self._upload is None:
            raise NotFound("This server version keeps no uploads; send the video.", param="video_id")
        return Asked(chat, self._upload)

    async def _read_form(self, content_type: str) -> VideoChat:
        reader = MultipartReader(self._request.stream(), content_type)
        fields: dict[str, Any] = {}
        while (part := await reader.next_part()) is not None:
            _check_part(part, fields)
            if part.name == "video":
                await self._store(reader.chunks())
                fields["video"] = self._upload.path if self._upload else None
            elif part.name == "stop":
                fields.setdefault("stop", []).append(await reader.text("stop"))
            elif part.name == "messages":
                fields["messages"] = _parse_json_field("messages", await reader.text("messages"))
            else:
                fields[part.name] = await reader.text(part.name)
        try:
            return VideoChatForm.model_validate(fields)
        except ValidationError as error:
            raise refusal(error) from None

    async def _read_json(self) -> VideoChat:
        most = self._settings.max_json_bytes
        body = bytearray()
        async for chunk in self._request.stream():
            body += chunk
            if len(body) > most:
                raise VideoTooLarge(f"A JSON body may have {most:,} bytes (VIDSPEC_MAX_JSON_BYTES); send a form.")
        try:  # in a thread: megabytes of base64 must not hold up everybody's tokens
            chat = await asyncio.to_thread(VideoChatJson.model_validate_json, body, strict=True)
        except ValidationError as error:
            raise refusal(error) from None
        if chat.video is None:
            return chat
        content = await asyncio.to_thread(decode_data_url, chat.video, self._settings.max_upload_bytes)
        await self._store(_once(content))
        return chat.model_copy(update={"video": None})  # on disk now; the request lives long, its base64 need not

    async def _store(self, chunks: AsyncIterator[bytes]) -> None:
        measured = _Measured(chunks)
        path = await write_upload(measured.chunks(), self._upload_dir, self._settings.max_upload_bytes)
        self._upload = Upload(path, measured.num_bytes, f"video-{measured.digest.hexdigest()[:32]}")


class _Measured:
    """Counts and hashes what passes through."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            self.num_bytes += len(chunk)
            self.digest.update(chunk)
            yield chunk


def refusal(error: ValidationError) -> InvalidRequest:
    """The first thing wrong, in one sentence that names the field and never repeats its value."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return _unknown_field(location[-1], ".".join(location))
    # Pydantic names the branch of a union, too; only fields and places in lists mean something to a client.
    param = ".".join(part for part in location if part in _NAMES or part.isdigit()) or None
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}." if param else f"{message}.", param=param)


def _check_part(part: PartHead, seen: dict[str, Any]) -> None:
    if part.name not in VideoChatForm.model_fields:
        raise _unknown_field(part.name, part.name)
    if part.name in seen and part.name != "stop":
        raise InvalidRequest(f"{part.name} is given twice.", param=part.name)
    if part.name == "video" and not part.is_file:
        raise InvalidRequest("video must be a file part, as in curl's -F video=@clip.mp4.", param="video")


def _unknown_field(name: str, param: str) -> InvalidRequest:
    close = difflib.get_close_matches(name, _NAMES, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"Unknown field {name[:64]!r}.{hint}", param=param[:64])


def _parse_json_field(name: str, text: str) -> object:
    try:
        return pydantic_core.from_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is not valid JSON.", param=name) from error


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
