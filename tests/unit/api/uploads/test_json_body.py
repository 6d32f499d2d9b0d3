"""Structural limits of a JSON body, whatever its content, and how long a refusal takes."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from vidspec_service.api.schemas.fields import MAX_TEXT, MAX_TURNS
from vidspec_service.api.schemas.video_chat import VideoChatJson
from vidspec_service.api.uploads.json_body import MAX_OUTSIDE, MAX_QUOTES, check_structure, read_json
from vidspec_service.errors import InvalidRequest

MEGABYTES = 8_000_000


async def chunks_of(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1024 * 1024):
        yield body[start : start + 1024 * 1024]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x',
        json.dumps({"video": "A" * MEGABYTES, "prompt": "x"}).encode(),
        json.dumps({"prompt": '"' * MAX_TEXT}).encode(),
        json.dumps({"prompt": "\\" * MAX_TEXT + '"'}).encode(),
        json.dumps({"prompt": "[],{}:" * (MAX_TEXT // 6)}).encode(),
        json.dumps({"prompt": "\U0001f3a5" * MAX_TEXT}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "x"}] * MAX_TURNS}, indent=8).encode(),
        json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 64}] * MAX_TURNS}
        ).encode(),
    ],
)
def test_every_valid_body_and_every_long_string_may_be_parsed(body: bytes) -> None:
    check_structure(body)


@pytest.mark.parametrize(
    "unit", [b'"k":1,', b"[],", b"{},", b"1,", b" ", b'"",', b'""', b'"\\""', b"[", b'"a":[{"b":'], ids=repr
)
def test_millions_of_small_values_are_refused_at_once(unit: bytes) -> None:
    body = b"{" + unit * (MEGABYTES // len(unit)) + b"}"
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="more values in it than any valid request"):
        check_structure(body)
    assert time.thread_time() - began < 2  # 0.05 s on an idle machine


@pytest.mark.parametrize("string", [b'\\"' * (MEGABYTES // 2), b"\\" * MEGABYTES, b'\\\\\\"' * 500_000])
def test_long_runs_of_escapes_cost_no_time(string: bytes) -> None:
    began = time.thread_time()
    try:
        check_structure(b'{"prompt":"' + string + b'"}')
    except InvalidRequest:
        assert string.count(b'"') + 4 > MAX_QUOTES
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("count", range(60, 70))
def test_whether_a_quote_is_escaped_depends_on_every_backslash_before_it(count: int) -> None:
    """After an escaped quote the string is still open, so the rest counts as inside it."""
    body = b'{"prompt":"x' + b"\\" * count + b'"' + b" " * (MAX_OUTSIDE + 1)
    if count % 2:
        check_structure(body)
    else:
        with pytest.raises(InvalidRequest):
            check_structure(body)


def test_a_large_body_costs_little_more_than_itself() -> None:
    """Thirty bodies of 28 MB took 3.2 GB when the parser copied each, and its base64 was copied into a string."""
    num_bytes = 28_000_000
    body = json.dumps({"prompt": "x", "video": "data:video/mp4;base64," + "A" * num_bytes}).encode()

    async def taken() -> int:
        fields, set_aside = await read_json(chunks_of(body), VideoChatJson, 2 * num_bytes)
        url = set_aside[fields.video or ""]
        return sum([len(piece) async for piece in url.decoded(2 * num_bytes, is_still=False)])

    tracemalloc.start()
    try:
        assert asyncio.run(taken()) == num_bytes * 3 // 4
        assert tracemalloc.get_traced_memory()[1] < 1.5 * num_bytes
    finally:
        tracemalloc.stop()


def test_the_longest_text_is_no_video_though_each_character_is_two_escapes() -> None:
    text = "\U0001f3a5" * MAX_TEXT
    body = json.dumps({"prompt": text}).encode()
    fields, set_aside = asyncio.run(read_json(chunks_of(body), VideoChatJson, len(body)))
    assert (fields.prompt, set_aside) == (text, {})


def test_base64_may_end_with_an_escape() -> None:
    """PHP escapes slashes."""
    body = b'{"prompt":"x","video":"' + b"A" * MEGABYTES + b'\\/\\/"}'
    fields, set_aside = asyncio.run(read_json(chunks_of(body), VideoChatJson, len(body)))
    url = set_aside[fields.video or ""]
    assert (url.end - url.begin, bytes(url.text[-3:])) == (MEGABYTES + 2, b"A//")


@pytest.mark.parametrize("end", [rb"\x", "\\/\u00e4".encode()])
def test_a_long_string_that_is_no_base64_is_refused_as_such(end: bytes) -> None:
    body = b'{"prompt":"x","video":"data:video/mp4;base64,' + b"A" * MEGABYTES + end + b'"}'

    async def taken() -> int:
        fields, set_aside = await read_json(chunks_of(body), VideoChatJson, len(body))
        return sum([len(piece) async for piece in set_aside[fields.video or ""].decoded(MEGABYTES, is_still=False)])

    with pytest.raises(InvalidRequest, match="base64 is malformed"):
        asyncio.run(taken())


def test_the_bound_is_exact() -> None:
    check_structure(b" " * MAX_OUTSIDE)
    with pytest.raises(InvalidRequest):
        check_structure(b" " * (MAX_OUTSIDE + 1))
