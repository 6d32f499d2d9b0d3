"""Reads a multipart form part by part while it arrives; never holds a file in memory nor uses its name.

python-multipart pushes events, our writer pulls chunks; the deque between them holds what one read brought.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vidspec_service.errors import InvalidRequest

MAX_PARTS = 64
MAX_FIELD_BYTES = 1024 * 1024
OVERHEAD_BYTES = 2 * 1024 * 1024  # what a form may have besides its file: heads, boundaries, text fields


@dataclass(frozen=True, slots=True)
class PartHead:
    """The start of a part: its field name and whether the client says it is a file."""

    name: str
    is_file: bool


class _Mark(Enum):
    PART_END = auto()


class MultipartReader:
    """Pull parser over one request body. Read each part to its end before asking for the next."""

    def __init__(self, stream: AsyncIterator[bytes], content_type: str) -> None:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise InvalidRequest("The multipart Content-Type names no boundary.")
        self._stream = stream
        self._events: deque[PartHead | bytes | _Mark] = deque()
        self._header_name = b""
        self._header_value = b""
        self._disposition: bytes = b""
        self._num_parts = 0
        self._is_complete = False
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
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest("The multipart boundary is malformed.") from error

    async def next_part(self) -> PartHead | None:
        """The next part's head, or None at the end of a complete form."""
        event = await self._next_event()
        if isinstance(event, PartHead):
            return event
        if event is not None:
            raise RuntimeError("the previous part was not read to its end")
        async for _ in self._stream:  # what follows the form is nothing to us, but must be read off the wire
            pass
        return None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The current part's content, as it arrives."""
        while isinstance(event := await self._next_event(), bytes):
            yield event

    async def text(self, name: str) -> str:
        """The current part's content as text, bounded."""
        content = bytearray()
        async for chunk in self.chunks():
            content += chunk
            if len(content) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"{name} is longer than {MAX_FIELD_BYTES} bytes.", param=name)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name} is not UTF-8 text.", param=name) from error

    async def _next_event(self) -> PartHead | bytes | _Mark | None:
        while not self._events:
            if self._is_complete:
                return None
            chunk = await anext(self._stream, b"")
            if not chunk:
                raise InvalidRequest("The multipart form ends before its closing boundary.")
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise InvalidRequest("The multipart form is malformed.") from error
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
        self._events.append(PartHead(name.decode(errors="replace"), b"filename" in options))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])

    def _on_part_end(self) -> None:
        self._events.append(_Mark.PART_END)

    def _on_end(self) -> None:
        self._is_complete = True
