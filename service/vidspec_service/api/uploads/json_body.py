"""Reads a JSON body, and checks its structure before it is parsed: all other threads wait while a parser runs.

A valid body is a few long strings. As many bytes of small values make pydantic collect millions of objects and errors,
which took 9 s for 31 MB, with no other thread of the process running. A string that is longer than any text can only be
a video's data: it is set aside, uncopied unless it has escapes, and the parser sees a short placeholder, its mark.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from vidspec_service.api.schemas.fields import MAX_TEXT
from vidspec_service.api.uploads.data_urls import DataUrl
from vidspec_service.api.uploads.validation_errors import to_invalid_request
from vidspec_service.errors import InvalidRequest, VideoTooLarge

MAX_OUTSIDE = 256 * 1024  # bytes outside strings; 256 turns of 64 parts need a third of it
MAX_QUOTES = 600_000  # enough for as many strings as MAX_OUTSIDE allows, and a text that consists of quotes only
MAX_TEXT_BYTES = 12 * MAX_TEXT  # if each character is two escapes of 6 bytes
_LOOK_BACK = 64  # bytes before a quote that are searched for backslashes first
_PIECE = 1024 * 1024  # bytes that are unescaped at once
_ESCAPE = 6  # bytes of the longest escape
# The beginning of a string, as far as it is printable ASCII; clients may escape any of it, as PHP's escape slashes.
_BEGINNING = re.compile(rb"(?:[\x20!#-\[\]-~]|\\/|\\u00[2-7][\da-fA-F]){0,256}")

J = TypeVar("J", bound=BaseModel)


async def read_json(chunks: AsyncIterator[bytes], model: type[J], max_bytes: int) -> tuple[J, dict[str, DataUrl]]:
    """The fields of a JSON body, and by its mark each string that was set aside; raises a RequestError."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise VideoTooLarge(
                f"A JSON body may have at most {max_bytes:,} bytes (VIDSPEC_MAX_JSON_BYTES); "
                "upload a larger video to /v1/videos and send its id."
            )
    # In a thread: megabytes of base64 must not delay the tokens of other requests.
    return await asyncio.to_thread(_validated, model, body)


def _validated(model: type[J], body: bytearray) -> tuple[J, dict[str, DataUrl]]:
    if body.startswith(BOM_UTF8):  # some programs begin their texts with it
        del body[: len(BOM_UTF8)]
    check_structure(body)
    rest, set_aside = _set_aside(body)
    try:
        return model.model_validate_json(rest, strict=True), set_aside
    except ValidationError as error:
        raise to_invalid_request(error, model) from None


def json_of_field(name: str, text: str) -> object:
    """The value of a form's field that is JSON; raises InvalidRequest."""
    check_structure(text.encode())
    try:
        return pydantic_core.from_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is not valid JSON.", param=name) from error


def check_structure(body: bytes | bytearray) -> None:
    """Raises InvalidRequest for more small values than any valid request has; does not check that it is JSON."""
    if body.count(b'"') > MAX_QUOTES or _outside_strings(body) > MAX_OUTSIDE:
        raise InvalidRequest(
            f"The JSON has more values in it than any valid request: {MAX_OUTSIDE:,} bytes outside strings."
        )


def _outside_strings(body: bytes | bytearray) -> int:
    """Number of bytes outside strings, plus one for each string."""
    count = position = 0
    for start, end in _strings(body):
        count += start - position
        position = end + 1
    return count + max(0, len(body) - position)


def _strings(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """The range of each string, from its first character to its closing quote, or to the end of the body."""
    position = 0
    while (quote := body.find(b'"', position)) >= 0:
        end = _end_of_string(body, quote + 1)
        yield quote + 1, end
        position = end + 1


def _end_of_string(body: bytes | bytearray, begin: int) -> int:
    """The position of the quote that closes the string whose first character is at `begin`."""
    while (quote := body.find(b'"', begin)) >= 0:
        if _num_backslashes(body, begin, quote) % 2 == 0:
            return quote
        begin = quote + 1
    return len(body)


def _num_backslashes(body: bytes | bytearray, begin: int, end: int) -> int:
    """Backslashes right before `end`, from `begin` on; copies a long string only if it may consist of backslashes."""
    for start in (max(begin, end - _LOOK_BACK), begin):
        before = body[start:end]
        count = len(before) - len(before.rstrip(b"\\"))
        if count < len(before):
            break
    return count


def _set_aside(body: bytearray) -> tuple[bytes | bytearray, dict[str, DataUrl]]:
    """The body with a short mark for each string that is longer than any text, and by its mark each such string.

    A mark begins as its string does, ends in digits that nobody can guess, and is still too long for any field but a
    video's data.
    """
    if len(body) <= MAX_TEXT_BYTES:
        return body, {}
    rest, set_aside, position = bytearray(), {}, 0
    for start, end in _strings(body):
        if end - start <= MAX_TEXT_BYTES:
            continue
        beginning = _BEGINNING.match(body, start, end)
        head = beginning[0] if beginning else b""
        said = pydantic_core.from_json(b'"' + head + b'"')
        tail = "#" * (MAX_TEXT + 1) + secrets.token_hex(16)
        set_aside[said + tail] = _to_data_url(body, start, end)
        rest += body[position:start] + head + tail.encode()
        position = end
    return rest + body[position:], set_aside


def _to_data_url(body: bytearray, start: int, end: int) -> DataUrl:
    """A string without a copy, or a copy without escapes if it has some: clients escape `/`, `+` and `=`."""
    if body.find(b"\\", start, end) < 0:
        return DataUrl(body, start, end)
    said, begin = bytearray(), start
    try:
        while begin < end:
            stop = min(begin + _PIECE, end)
            escape = body.rfind(b"\\", stop - _ESCAPE + 1, stop) if stop < end else -1
            stop = stop if escape < 0 else escape
            said += pydantic_core.from_json(b'"' + body[begin:stop] + b'"').encode("ascii")
            begin = stop
    except ValueError:
        return DataUrl(body, start, end)  # this is not base64, and decoding it will say so
    return DataUrl(said, 0, len(said))
