"""Reads a JSON body, and bounds what it consists of before it is parsed: a parser holds up everybody while it runs.

A valid body is a few long strings. As many bytes of small values make pydantic collect millions of objects and errors,
which took 9 s for 31 MB, with no other thread of the process running. A string that is longer than any text can only be
a video's data: it is set aside where it lies, and the parser sees a short one that stands for it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from vidspec_service.api.schemas.fields import MAX_TEXT
from vidspec_service.api.uploads.data_urls import DataUrl
from vidspec_service.api.uploads.refusals import refusal, unknown_field
from vidspec_service.errors import InvalidRequest, VideoTooLarge

MAX_OUTSIDE = 256 * 1024  # bytes that are in no string; 256 turns of 64 parts need a third of it
MAX_QUOTES = 600_000  # those of as many strings, and of a text that consists of nothing else
MAX_TEXT_BYTES = 12 * MAX_TEXT  # of characters that are two escapes each
_FEW = 64  # bytes that are looked at first for backslashes before a quote
_PIECE = 1024 * 1024  # bytes that are unescaped at once
_ESCAPE = 6  # bytes of the longest
_PLAIN = re.compile(rb"[\x20!#-\[\]-~]{0,256}")  # the beginning of a string, as it is

J = TypeVar("J", bound=BaseModel)


async def read_json(chunks: AsyncIterator[bytes], model: type[J], max_bytes: int) -> tuple[J, dict[str, DataUrl]]:
    """The fields of a JSON body, and what stands for a string that was set aside; raises a RequestError."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise VideoTooLarge(f"A JSON body may have {max_bytes:,} bytes (VIDSPEC_MAX_JSON_BYTES); send a form.")
    # In a thread: megabytes of base64 must not hold up everybody's tokens.
    return await asyncio.to_thread(_validated, model, body)


def _validated(model: type[J], body: bytearray) -> tuple[J, dict[str, DataUrl]]:
    check_structure(body)
    rest, set_aside = _set_aside(body, model)
    try:
        return model.model_validate_json(rest, strict=True), set_aside
    except ValidationError as error:
        raise refusal(error, model) from None


def json_of_field(name: str, text: str) -> object:
    """What a form's field says in JSON; raises InvalidRequest."""
    check_structure(text.encode())
    try:
        return pydantic_core.from_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is not valid JSON.", param=name) from error


def check_structure(body: bytes | bytearray) -> None:
    """InvalidRequest for JSON of more small values than any valid request has; whether it is JSON is not looked at."""
    if body.count(b'"') > MAX_QUOTES or _outside_strings(body) > MAX_OUTSIDE:
        raise InvalidRequest("The JSON has more values in it than any valid request.")


def _outside_strings(body: bytes | bytearray) -> int:
    """Bytes outside of strings, and one for each string; counted no further than is needed to refuse."""
    count = position = 0
    for start, end in _strings(body):
        count += start - position
        position = end + 1
        if count > MAX_OUTSIDE:
            return count
    return count + max(0, len(body) - position)


def _strings(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """From the first character of each string to its closing quote, or to the end of the body."""
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
    """Those right before `end`, from `begin` on; a string of megabytes is copied only if it may be all backslashes."""
    for start in (max(begin, end - _FEW), begin):
        before = body[start:end]
        count = len(before) - len(before.rstrip(b"\\"))
        if count < len(before):
            break
    return count


def _set_aside(body: bytearray, model: type[BaseModel]) -> tuple[bytes | bytearray, dict[str, DataUrl]]:
    """The body with short strings for those that are longer than any text, and what each of them stands for.

    A short one begins as its long one does, ends in a mark that nobody can guess, and is still too long for any field
    but a video's data.
    """
    if len(body) <= MAX_TEXT_BYTES:
        return body, {}
    rest, set_aside, position = bytearray(), {}, 0
    for start, end in _strings(body):
        if end - start <= MAX_TEXT_BYTES:
            continue
        beginning = _PLAIN.match(body, start, end)
        head = beginning[0] if beginning else b""
        if body[end + 1 : end + 1 + _FEW].lstrip().startswith(b":"):
            raise unknown_field(head.decode(), head.decode(), model)
        mark = (head + b"#" * (MAX_TEXT + 1) + secrets.token_hex(16).encode()).decode()
        set_aside[mark] = _as_data(body, start, end)
        rest += body[position:start] + mark.encode()
        position = end
    return rest + body[position:], set_aside


def _as_data(body: bytearray, start: int, end: int) -> DataUrl:
    """What a string says, where it lies; without its escapes if it has some: clients escape `/`, `+` and `=`."""
    if body.find(b"\\", start, end) < 0:
        return DataUrl(body, start, end)
    said = bytearray()
    try:
        while start < end:
            stop = min(start + _PIECE, end)
            escape = body.rfind(b"\\", stop - _ESCAPE + 1, stop) if stop < end else -1
            stop = stop if escape < 0 else escape
            said += pydantic_core.from_json(b'"' + body[start:stop] + b'"').encode("ascii")
            start = stop
    except ValueError:
        return DataUrl(body, start, end)  # no base64, as whoever decodes it will say
    return DataUrl(said, 0, len(said))
