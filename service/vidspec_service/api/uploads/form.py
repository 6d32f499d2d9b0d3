"""Reads a multipart form part by part while it arrives; never holds a file in memory nor uses its name.

python-multipart pushes events, our reader pulls them; the deque between the two holds the events of one read: for each
part its name, its content and _PART_END.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vidspec_service.api.schemas.fields import Strict, VideoFile
from vidspec_service.api.uploads.json_body import json_of_field
from vidspec_service.api.uploads.validation_errors import to_invalid_request, unknown_field_error
from vidspec_service.errors import InvalidRequest

MAX_PARTS = 64
MAX_FIELD_BYTES = 1024 * 1024
_JSON_FIELDS = frozenset({"messages", "logit_bias", "response_format", "structured_outputs", "guided_choice"})
OVERHEAD_BYTES = 2 * 1024 * 1024  # what a form may have besides its files: part headers, boundaries, text
_PART_END = b""
_SLICE = 32 * 1024  # bytes that are parsed before others get their turn: what nearly is a boundary takes 5 ms

F = TypeVar("F", bound=Strict)
Store = Callable[[AsyncIterator[bytes], int], Awaitable[VideoFile]]
"""Writes the chunks of a file part to disk; the number tells how many videos came before it."""


async def read_form(chunks: AsyncIterator[bytes], content_type: str, model: type[F], store: Store) -> F:
    """The fields of a form, whose files are passed to `store`; raises a RequestError."""
    reader = MultipartReader(chunks, content_type)
    fields: dict[str, Any] = {}
    names: list[str] = []
    while (part := await reader.next_part()) is not None:
        name, is_file = part
        if name not in model.model_fields:
            raise unknown_field_error(name, name, model)
        is_repeated = name in model.repeated
        if name in fields and not is_repeated:
            raise InvalidRequest(f"{name} is given twice.", param=name)
        if name == "video" and not is_file:
            raise InvalidRequest("video must be a file part, as in curl's -F video=@clip.mp4.", param="video")
        num_before = sum(each.startswith("video") for each in names)
        names.append(name)
        value = await store(reader.chunks(), num_before) if name == "video" else await reader.text(name)
        if is_repeated:
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    # In a thread: a field's text may have a hundred thousand values in it.
    return await asyncio.to_thread(_validated, model, fields, names)


def _validated(model: type[F], fields: dict[str, Any], names: list[str]) -> F:
    said = {name: json_of_field(name, str(fields[name])) for name in _JSON_FIELDS & fields.keys()}
    try:
        return model.model_validate(fields | said, context=names)
    except ValidationError as error:
        raise to_invalid_request(error, model) from None


class MultipartReader:
    """Pull parser over one request body. Read each part to its end before asking for the next."""

    def __init__(self, stream: AsyncIterator[bytes], content_type: str) -> None:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise InvalidRequest("The multipart Content-Type names no boundary.")
        self._stream = stream
        self._events: deque[tuple[str, bool] | bytes | None] = deque()  # None ends the form
        self._header_name = self._header_value = self._disposition = b""
        self._num_parts = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": lambda: self._events.append(_PART_END),
                    "on_end": lambda: self._events.append(None),
                },
            )
        except FormParserError as error:
            raise InvalidRequest("The multipart boundary is malformed.") from error

    async def next_part(self) -> tuple[str, bool] | None:
        """The next part's field name and whether the client says it is a file; None after a complete form."""
        event = await self._next_event()
        assert not isinstance(event, bytes), "the previous part was not read to its end"
        if event is None:
            async for _ in self._stream:  # what follows the form is ignored, but must be read off the connection
                pass
        return event

    async def chunks(self) -> AsyncIterator[bytes]:
        """The current part's content, as it arrives."""
        while isinstance(event := await self._next_event(), bytes) and event != _PART_END:
            yield event

    async def text(self, name: str) -> str:
        """The current part's content as text, bounded."""
        content = bytearray()
        async for chunk in self.chunks():
            content += chunk
            if len(content) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"{name} is longer than {MAX_FIELD_BYTES} bytes.", param=name)
        try:
            return content.decode("utf-8-sig")  # without a byte order mark, with which some programs begin their texts
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name} is not UTF-8 text.", param=name) from error

    async def _next_event(self) -> tuple[str, bool] | bytes | None:
        while not self._events:
            chunk = await anext(self._stream, b"")
            if not chunk:
                raise InvalidRequest("The multipart form ends before its closing boundary.")
            for start in range(0, len(chunk), _SLICE):
                try:
                    self._parser.write(chunk[start : start + _SLICE])
                except FormParserError as error:
                    raise InvalidRequest("The multipart form is malformed.") from error
                await asyncio.sleep(0)
        return self._events.popleft()

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        options = parse_options_header(self._disposition.decode("latin-1"))[1]
        name = options.get(b"name")
        if name is None:
            raise InvalidRequest("A part of the form has no name.")
        # Some clients send a name outside ASCII as `filename*` only, which the parser leaves out, as RFC 7578 asks.
        is_file = b"filename" in options or b"filename*=" in self._disposition
        self._events.append((name.decode(errors="replace"), is_file))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])
