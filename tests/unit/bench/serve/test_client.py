"""Requests to the real application on fakes: answers, refusals, clients that leave, servers that are not there."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.world import CLIP_BYTES
from tests.clips import bar_codes, number_of, write_video
from tests.component.decoding.reading import read
from tests.fakes import ACCEPTED, ANSWER, FakeDecodePool, FakeEngine
from tests.unit.cli.live_api import live_api
from vidspec_service.bench.serve.client import LoadClient, LoadRequest, Outcome
from vidspec_service.bench.serve.load import closed_load, endless, mixed_requests, open_load, render_clips
from vidspec_service.bench.serve.server import Server
from vidspec_service.errors import ConfigError, GenerationFailed, VideoUnreadable

REQUEST = LoadRequest(clip=CLIP_BYTES, max_tokens=5)


def ask(url: str, request: LoadRequest = REQUEST) -> Outcome:
    async def body() -> Outcome:
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


@pytest.mark.parametrize("key", [None, "not-the-key-0123456789"])
def test_a_server_that_wants_another_key_is_told_before_the_load(tmp_path: Path, key: str | None) -> None:
    with (
        live_api(tmp_path / "uploads", FakeEngine(), keys=["the-key-0123456789abcdef"]) as url,
        pytest.raises(ConfigError, match="HTTP 401: Send a valid API key"),
    ):
        asyncio.run(model_of(url, key))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "nothing"])
def test_a_server_that_is_not_there_is_told_before_the_load(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be asked"):
        asyncio.run(model_of(url, None))


async def model_of(url: str, key: str | None) -> str:
    async with LoadClient(url, 10.0, key) as client:
        return await client.model()


def test_given_files_differ_each_time_and_play_the_same(tmp_path: Path) -> None:
    for name, codec in (("a.mp4", "h264"), ("a.mkv", "h264"), ("a.webm", "vp8"), ("a.avi", "mpeg4"), ("a.ts", "h264")):
        content = write_video(tmp_path / name, bar_codes(4), codec=codec).read_bytes()
        sent = list(itertools.islice(endless([content], is_repeated=False), 2))
        assert len({content, *sent}) == 3
        (tmp_path / name).write_bytes(sent[1])
        clip = read(tmp_path / name)
        assert [number_of(frame) for frame in clip.video.frames] == [0, 1, 2, 3]
        assert not [warning for warning in clip.warnings if "damage" in warning], name


def test_a_refusal_has_its_status_and_code(tmp_path: Path) -> None:
    broken = FakeDecodePool(VideoUnreadable("It is damaged.", param="video"))
    with live_api(tmp_path / "uploads", FakeEngine(), broken) as url:
        outcome = ask(url)
    assert (outcome.status, outcome.code, outcome.is_complete) == (422, "video_unreadable", False)


def test_an_error_inside_a_stream_is_no_answer(tmp_path: Path) -> None:
    engine = FakeEngine(*ANSWER[:2], GenerationFailed("It failed."))
    with live_api(tmp_path / "uploads", engine) as url:
        outcome = ask(url)
    assert (outcome.status, outcome.code, outcome.is_complete) == (200, "generation_failed", False)
    assert outcome.ttft_s is not None


def test_no_server_is_a_lost_request() -> None:
    outcome = ask("http://127.0.0.1:9")
    assert (outcome.status, outcome.code, outcome.left_early) == (0, "ConnectError", False)


@pytest.mark.parametrize("leaving", [replace(REQUEST, leave_after_events=1), replace(REQUEST, leave_after_bytes=100)])
def test_who_leaves_early_is_not_lost(tmp_path: Path, leaving: LoadRequest) -> None:
    # The engine waits for ever: only a client that leaves ends its answer.
    engine = FakeEngine(ACCEPTED, ANSWER[1], asyncio.Event())
    with live_api(tmp_path / "uploads", engine) as url:
        outcome = ask(url, leaving)
        assert (outcome.left_early, outcome.is_complete, outcome.code) == (True, False, None)


def loaded(url: str, load: Callable[[LoadClient], Coroutine[Any, Any, tuple[list[Outcome], float]]]) -> list[Outcome]:
    async def body() -> list[Outcome]:
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
    requests = mixed_requests(endless([CLIP_BYTES], is_repeated=True), 64, None, random.Random(0))
    asked = [next(requests) for _ in range(1000)]
    assert 200 < sum(request.leave_after_events is not None for request in asked) < 300
    assert 100 < sum(request.leave_after_bytes is not None for request in asked) < 200
    assert {request.num_frames for request in asked} == {None, 1, 4, 8}


def test_files_are_told_apart_unless_they_are_to_be_repeated() -> None:
    clips = render_clips(2, is_mixed=True)
    files = endless(clips, is_repeated=False)
    assert len({next(files) for _ in range(9)}) == 9
    repeated = endless(clips, is_repeated=True)
    assert {next(repeated) for _ in range(9)} == set(clips)


def test_a_footprint_counts_the_whole_tree(tmp_path: Path) -> None:
    (tmp_path / "upload-1").touch()
    server = Server(url="", pid=os.getpid(), upload_dir=tmp_path)
    before = server.footprint()
    assert before["num_files"] == 1
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = server.footprint()
    assert during["num_processes"] == before["num_processes"] + 2
    assert during["resident_bytes"] > before["resident_bytes"]
