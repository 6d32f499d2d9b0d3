"""Streamed answers: every byte of the events, and what a client sees when something fails during the stream."""

from __future__ import annotations

import asyncio
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_disconnect import LeavingClient
from tests.api.test_disconnect import body as asked
from tests.api.world import PATIENCE_S, World, hold_deadlines, until
from tests.fakes import ANSWER, FINISHED, PROMPT_READY, FakeEngine
from vidspec_service.engine.types import FinishReason, TextDelta
from vidspec_service.errors import ContextLengthExceeded, GenerationFailed, QueueFull

pytestmark = [pytest.mark.api, pytest.mark.anyio]


def events_of(body: str) -> list[Any]:
    """The parsed events; the end mark stays text."""
    assert body.endswith("\n\n")
    events = [event for event in body.split("\n\n")[:-1] if not event.startswith(":")]
    payloads = [event.removeprefix("data: ") for event in events]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def text_of(events: list[Any]) -> str:
    """The text that a client would show."""
    choices = [choice for event in events[:-1] for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_no_client_takes_a_character_of_an_answer_for_the_end_of_a_line(tmp_path: Path) -> None:
    """Python splits text at more than the ends of lines of server-sent events."""
    said = "a\x85b\u2028c\u2029d\x1ce\n\nf\rg"
    response = await World(tmp_path, FakeEngine(PROMPT_READY, TextDelta(text=said, num_tokens=2), FINISHED)).ask(
        stream=True
    )
    *events, end = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert text_of([*map(json.loads, events), end]) == said


async def test_the_stream_is_exactly_these_bytes(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.ask(stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    final = events_of(response.text)[-2]
    video = json.dumps(final["video"], separators=(",", ":"))
    timings = response.text.rpartition('"timings":')[2].partition("}")[0] + "}"
    head = (
        f'data: {{"id":"{final["id"]}","object":"video.chat.completion.chunk",'
        f'"created":{final["created"]},"model":"fake-target","choices":'
    )
    assert response.text == (
        head + '[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
        + head + '[{"index":0,"delta":{"content":"A red"},"finish_reason":null}]}\n\n'
        + head + '[{"index":0,"delta":{"content":" squäre."},"finish_reason":null}]}\n\n'
        + head + '[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        + head + '[],"usage":{"prompt_tokens":40,"completion_tokens":5,"total_tokens":45,'
        '"prompt_tokens_details":{"video_tokens":30,"cached_tokens":2},'
        '"completion_tokens_details":{"reasoning_tokens":0,"accepted_prediction_tokens":3,"rejected_prediction_tokens":1}},'
        f'"video":{video},"videos":[{video}],"speculation":{{"mode":"parallel","acceptance_rate":0.75,'
        f'"mean_accepted_tokens":1.5,"draft_video_tokens":3}},"timings":{timings}}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


async def test_a_stream_says_the_same_as_a_whole_answer(tmp_path: Path) -> None:
    world = World(tmp_path)
    whole = (await world.ask()).json()
    events = events_of((await world.ask_form(stream="true")).text)
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    for block in ("usage", "speculation"):
        assert events[-2][block] == whole[block]
    assert events[-2]["video"] == whole["video"]


async def test_the_token_limit_is_reported_as_length(tmp_path: Path) -> None:
    ended = type(FINISHED)(
        finish_reason=FinishReason.LENGTH, completion_tokens=0, speculation=FINISHED.speculation,
        queue_s=0.0, prefill_s=0.0,
    )  # fmt: skip
    events = events_of((await World(tmp_path, FakeEngine(PROMPT_READY, ended)).ask(stream=True)).text)
    assert events[1]["choices"][0]["finish_reason"] == "length"
    assert events[2]["timings"]["time_to_first_token_s"] == 0.0


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthExceeded("1100 tokens do not fit 1024."), 400, "context_length_exceeded"),
        (QueueFull("full", retry_after_s=2.2), 503, "queue_full"),
        (GenerationFailed("CUDA error at 0xdeadbeef"), 500, "generation_failed"),
    ],
)
async def test_what_fails_before_the_first_event_has_a_status(
    tmp_path: Path, error: Exception, status: int, code: str
) -> None:
    world = World(tmp_path, FakeEngine(error))
    response = await world.ask(stream=True)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "0xdeadbeef" not in response.text
    assert world.metric("e2e_request_latency_seconds_count") == 0, "no generation has begun"


async def test_a_failure_on_the_way_becomes_an_error_event_and_the_end_mark(tmp_path: Path, log: io.StringIO) -> None:
    engine = FakeEngine(*ANSWER[:2], GenerationFailed("CUDA error at 0xdeadbeef"))
    world = World(tmp_path, engine)
    response = await world.ask(stream=True)
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    request_id = response.headers["x-request-id"]
    assert events[-2] == {
        "error": {
            "message": f"The server failed to answer (request id {request_id}).",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    }
    assert "0xdeadbeef" in log.getvalue(), "the operator is told why"
    assert world.metric("request_success_total", finished_reason="error") == 1
    assert world.admission.num_admitted == 0
    assert world.leftovers == []


@pytest.mark.parametrize("bug", [ValueError("of ours, at /secret/path"), ConnectionResetError("secret")])
async def test_a_bug_on_the_way_is_told_without_its_words(tmp_path: Path, log: io.StringIO, bug: Exception) -> None:
    response = await World(tmp_path, FakeEngine(*ANSWER[:2], bug)).ask(stream=True)
    events = events_of(response.text)
    assert events[-2]["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "Traceback" in log.getvalue()


async def test_an_engine_that_ends_without_an_end_is_an_error_not_a_silence(tmp_path: Path) -> None:
    events = events_of((await World(tmp_path, FakeEngine(*ANSWER[:2])).ask(stream=True)).text)
    assert events[-2]["error"]["code"] == "generation_failed"


async def test_an_engine_that_begins_without_started_is_an_error(tmp_path: Path) -> None:
    response = await World(tmp_path, FakeEngine(*ANSWER[1:])).ask()
    assert response.status_code == 500


async def test_a_pause_is_filled_with_comments(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(ANSWER[0], gate, *ANSWER[1:]), keep_alive_s=0.02)
    client, began = LeavingClient(world, asked(stream=True)), time.monotonic()
    answering = client.start()
    await until(lambda: client.text.count(": keep-alive\n\n") >= 3)
    gate.set()
    await asyncio.wait_for(answering, PATIENCE_S)
    assert client.text.count(": keep-alive\n\n") <= (time.monotonic() - began) / 0.02
    assert text_of(events_of(client.text)) == "A red squäre."


async def test_a_busy_stream_has_no_comments(tmp_path: Path) -> None:
    assert ": keep-alive" not in (await World(tmp_path).ask(stream=True)).text


async def test_a_deadline_during_the_decode_or_the_queue_is_a_504(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, FakeEngine(asyncio.Event()), request_timeout_s=0.05)
    hold_deadlines(monkeypatch, until=lambda: world.engine.num_held == 1)
    response = await world.ask(stream=True)
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert "VIDSPEC_REQUEST_TIMEOUT_S" in error["message"]
    assert len(world.engine.cancelled) == 1


async def test_the_time_without_a_target_is_added_to_a_requests_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(*ANSWER[:2], gate, *ANSWER[2:])
    status = engine.status
    monkeypatch.setattr(engine, "status", lambda: replace(status(), outage_s=60.0 * engine.num_held))
    world = World(tmp_path, engine, request_timeout_s=0.05)
    hold_deadlines(monkeypatch, until=lambda: engine.num_held == 1)
    asking = asyncio.create_task(world.ask())
    await until(lambda: engine.num_held == 1)
    await asyncio.sleep(0.2)
    gate.set()
    assert (await asking).status_code == 200


async def test_a_deadline_on_the_way_is_an_error_event_and_cancels_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()), request_timeout_s=0.1)
    hold_deadlines(monkeypatch, until=lambda: world.engine.num_held == 1)
    events = events_of((await world.ask(stream=True)).text)
    assert text_of([*events[:2], "[DONE]"]) == "A red"
    assert events[-2]["error"]["code"] == "deadline_exceeded"
    assert len(world.engine.cancelled) == 1


async def test_a_whole_answer_that_takes_too_long_is_a_504(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()), request_timeout_s=0.05)
    hold_deadlines(monkeypatch, until=lambda: world.engine.num_held == 1)
    assert (await world.ask()).status_code == 504
    assert len(world.engine.cancelled) == 1
