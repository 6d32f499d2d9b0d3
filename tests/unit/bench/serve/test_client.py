"""Requests to the real application on fakes: answers, refusals, clients that disconnect, unreachable servers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.world import CLIP_BYTES
from tests.fakes import ANSWER, PROMPT_READY, FakeDecodePool, FakeEngine
from tests.unit.cli.live_api import live_api
from vidspec_models.request import Reasoning
from vidspec_service import loopback
from vidspec_service.bench.common.server import cycle_clips
from vidspec_service.bench.serve.load import (
    LoadClient,
    LoadRequest,
    RequestOutcome,
    closed_load,
    mixed_requests,
    open_load,
)
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import ConfigError, GenerationFailed, VideoUnreadable

REQUEST = LoadRequest(clip=CLIP_BYTES, max_tokens=5)


def ask(url: str, request: LoadRequest = REQUEST) -> RequestOutcome:
    async def body() -> RequestOutcome:
        async with LoadClient(url, 10.0, None) as client:
            return await client.send(request, time.perf_counter(), 0.0)

    return asyncio.run(body())


def test_a_whole_answer_has_its_times_and_tokens(tmp_path: Path) -> None:
    with live_api(tmp_path / "uploads", FakeEngine()) as url:
        outcome = ask(url)
    assert (outcome.status, outcome.code, outcome.num_tokens) == (200, None, 5)
    assert outcome.is_complete
    assert outcome.ttft_s is not None
    assert 0 < outcome.ttft_s <= outcome.e2e_s
    assert outcome.tpot_s == (outcome.e2e_s - outcome.ttft_s) / 4


def test_our_own_server_is_asked_without_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with live_api(tmp_path / "uploads", FakeEngine()) as url:
        assert ask(url).status == 200


@pytest.mark.parametrize("key", [None, "not-the-key-0123456789"])
def test_a_server_that_wants_another_key_is_told_before_the_load(tmp_path: Path, key: str | None) -> None:
    with (
        live_api(tmp_path / "uploads", FakeEngine(), keys=["the-key-0123456789abcdef"]) as url,
        pytest.raises(ConfigError, match="HTTP 401: Send a valid API key"),
    ):
        asyncio.run(model_of(url, key))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "http://localhost:80a", "nothing"])
def test_a_server_that_is_not_there_is_told_before_the_load(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be asked"):
        asyncio.run(model_of(url, None))


def test_an_address_without_a_scheme_is_one_of_http(tmp_path: Path) -> None:
    with live_api(tmp_path / "uploads", FakeEngine()) as url:
        assert asyncio.run(model_of(url.removeprefix("http://"), None))


async def model_of(url: str, key: str | None) -> str:
    async with LoadClient(url, 10.0, key) as client:
        return await client.model()


def test_a_refusal_has_its_status_and_code(tmp_path: Path) -> None:
    broken = FakeDecodePool(VideoUnreadable("It is damaged.", param="video"))
    with live_api(tmp_path / "uploads", FakeEngine(), broken) as url:
        outcome = ask(url)
    assert (outcome.status, outcome.code, outcome.is_complete) == (422, "video_unreadable", False)


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, "<html>busy</html>"), (429, '{"message": "rate limit exceeded"}'), (404, '{"error": "no such route"}')],
)
def test_an_error_of_a_proxy_keeps_its_status(status: int, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = httpx.MockTransport(lambda _: httpx.Response(status, text=body, headers={"retry-after": "1"}))
    monkeypatch.setattr(loopback, "_transport", lambda *_: proxy)
    outcome = ask("http://proxy")
    assert (outcome.status, outcome.code, outcome.is_complete) == (status, "without a code", False)


def test_a_stream_that_ends_before_its_client_would_have_left_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'data: {"choices": [{"delta": {"content": "A"}}]}\n\n'
    proxy = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    monkeypatch.setattr(loopback, "_transport", lambda *_: proxy)
    for leave_after, left_early in ((1, True), (2, False)):
        outcome = ask("http://proxy", replace(REQUEST, leave_after_events=leave_after))
        assert (outcome.left_early, outcome.is_complete) == (left_early, False)


def test_the_first_thought_of_a_model_is_its_first_token(tmp_path: Path) -> None:
    thought = TextDelta(text="A red", num_tokens=2)
    engine = FakeEngine(replace(PROMPT_READY, reasoning=Reasoning.OPEN), thought, GenerationFailed("It failed."))
    with live_api(tmp_path / "uploads", engine) as url:
        assert ask(url).ttft_s is not None


def test_an_error_inside_a_stream_is_no_answer(tmp_path: Path) -> None:
    engine = FakeEngine(*ANSWER[:2], GenerationFailed("It failed."))
    with live_api(tmp_path / "uploads", engine) as url:
        outcome = ask(url)
    assert (outcome.status, outcome.code, outcome.is_complete) == (200, "generation_failed", False)
    assert outcome.ttft_s is not None
    assert outcome.e2e_s > outcome.ttft_s


def test_no_server_is_a_lost_request() -> None:
    outcome = ask("http://127.0.0.1:9")
    assert (outcome.status, outcome.code, outcome.left_early) == (0, "ConnectError", False)


@pytest.mark.parametrize("leaving", [replace(REQUEST, leave_after_events=1), replace(REQUEST, leave_after_bytes=100)])
def test_who_leaves_early_is_not_lost(tmp_path: Path, leaving: LoadRequest) -> None:
    # The engine waits forever: only a client that disconnects ends its answer.
    engine = FakeEngine(PROMPT_READY, ANSWER[1], asyncio.Event())
    with live_api(tmp_path / "uploads", engine) as url:
        outcome = ask(url, leaving)
        assert (outcome.left_early, outcome.is_complete, outcome.code) == (True, False, None)


def loaded(
    url: str, load: Callable[[LoadClient], Coroutine[Any, Any, tuple[list[RequestOutcome], float]]]
) -> list[RequestOutcome]:
    async def body() -> list[RequestOutcome]:
        async with LoadClient(url, 10.0, None) as client:
            return (await load(client))[0]

    return asyncio.run(body())


def test_a_closed_load_asks_each_request_once(tmp_path: Path) -> None:
    told = list[int]()
    with live_api(tmp_path / "uploads", FakeEngine()) as url:
        outcomes = loaded(url, lambda client: closed_load(client, [REQUEST] * 7, 3, told.append))
    assert [outcome.is_complete for outcome in outcomes] == [True] * 7
    assert told == [1, 2, 3, 4, 5, 6, 7]


def test_an_open_load_counts_from_when_each_request_was_due(tmp_path: Path) -> None:
    with live_api(tmp_path / "uploads", FakeEngine()) as url:
        due = [0.0, 0.01, 0.02, 0.02]
        outcomes = loaded(url, lambda client: open_load(client, iter([REQUEST] * 9), due, lambda _: None))
    assert sorted(outcome.due_s for outcome in outcomes) == due
    assert all(outcome.is_complete for outcome in outcomes)


def test_a_soak_has_clients_of_every_kind() -> None:
    requests = mixed_requests(cycle_clips([CLIP_BYTES], is_repeated=True), 64, None, random.Random(0))
    asked = [next(requests) for _ in range(1000)]
    assert 200 < sum(request.leave_after_events is not None for request in asked) < 300
    assert 100 < sum(request.leave_after_bytes is not None for request in asked) < 200
    assert {request.num_frames for request in asked} == {None, 1, 4, 8}


def test_a_proxy_is_not_asked_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However its server is named; httpx takes no SOCKS proxy without another package."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with live_api(tmp_path / "uploads", FakeEngine()) as url:
        assert ask(url.removeprefix("http://")).is_complete
    with pytest.raises(ConfigError, match=r"vidspec\.invalid cannot be asked: Using SOCKS proxy"):
        LoadClient("vidspec.invalid", 10.0, None)
