"""Reads a JSON body, and bounds what it consists of before it is parsed: a parser holds up everybody while it runs.

A valid body is a few long strings. As many bytes of small values make pydantic collect millions of objects and errors,
which took 9 s for 31 MB, with no other thread of the process running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel

from vidspec_service.errors import InvalidRequest, VideoTooLarge

MAX_OUTSIDE = 256 * 1024  # bytes that are in no string; 256 turns of 64 parts need a third of it
MAX_QUOTES = 600_000  # those of as many strings, and of a text that consists of nothing else
_FEW = 64  # bytes that are looked at first for backslashes before a quote

J = TypeVar("J", bound=BaseModel)


async def read_json(chunks: AsyncIterator[bytes], model: type[J], max_bytes: int) -> J:
    """The fields of a JSON body, with its data URL; raises a RequestError, or ValidationError for the fields."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise VideoTooLarge(f"A JSON body may have {max_bytes:,} bytes (VIDSPEC_MAX_JSON_BYTES); send a form.")
    # In a thread: megabytes of base64 must not hold up everybody's tokens.
    return await asyncio.to_thread(_validated, model, body)


def _validated(model: type[J], body: bytearray) -> J:
    check_structure(body)
    return model.model_validate_json(body, strict=True)


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
    while count <= MAX_OUTSIDE:
        start = body.find(b'"', position)
        if start < 0:
            return count + len(body) - position
        count += start - position + 1
        position = _end_of_string(body, start + 1)
    return count


def _end_of_string(body: bytes | bytearray, begin: int) -> int:
    """The position after the string whose first character is at `begin`."""
    while (quote := body.find(b'"', begin)) >= 0:
        if _num_backslashes(body, begin, quote) % 2 == 0:
            return quote + 1
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
