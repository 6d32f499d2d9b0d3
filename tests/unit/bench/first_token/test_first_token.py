"""`bench first-token` without a server: how stages and figures are computed, and what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest

from tests.unit.bench.reports import draws, text_of
from vidspec_service import loopback
from vidspec_service.bench import first_token as first_token_bench
from vidspec_service.bench.common.server import LocalServer, cycle_clips
from vidspec_service.bench.first_token import (
    ClipTimes,
    FirstToken,
    FirstTokenOptions,
    Stage,
    clip_row,
    first_token_report,
    measure_first_tokens,
    send_clip,
    spans_of,
)
from vidspec_service.errors import ConfigError

TIMINGS = {"time_to_first_token_s": 0.9, "decode_s": 0.3, "queue_s": 0.1, "prefill_s": 0.5}
TIMELINE = [
    {"worker": "target", "phase": "prepare", "start_s": 0.4, "end_s": 0.6},
    {"worker": "draft", "phase": "prepare", "start_s": 0.4, "end_s": 0.7},
    {"worker": "target", "phase": "prefill", "start_s": 0.6, "end_s": 0.8},
    {"worker": "target", "phase": "prefill", "start_s": 0.8, "end_s": 0.9},
    {"worker": "draft", "phase": "propose", "start_s": 0.9, "end_s": 2.0},
    {"worker": "draft", "phase": "prefill", "start_s": 1.1, "end_s": 1.2},  # after the first token
]


def first_token(seconds: float = 1.0, sent_s: float = 0.0) -> FirstToken:
    return FirstToken(seconds=seconds, sent_s=sent_s, spans=tuple(spans_of(TIMINGS, TIMELINE, seconds)))


def test_the_servers_clock_starts_when_it_has_the_whole_request() -> None:
    found = first_token(1.0)
    times = {(each.worker, each.stage): (each.start_s, each.end_s) for each in found.spans}
    assert times["api", Stage.UPLOAD] == pytest.approx((0.0, 0.1))
    assert times["api", Stage.DECODE] == pytest.approx((0.1, 0.4))
    assert times["api", Stage.QUEUE] == pytest.approx((0.4, 0.5))
    assert times["target", Stage.TOWER] == pytest.approx((0.5, 0.7))
    assert times["draft", Stage.TOWER] == pytest.approx((0.5, 0.8))


def test_a_stage_is_what_the_first_token_waited_for_and_no_work_of_the_drafts() -> None:
    found = first_token(1.0)
    stages = {stage: round(found.stage_s(stage), 6) for stage in Stage}
    assert stages == {
        Stage.UPLOAD: 0.1,
        Stage.DECODE: 0.3,
        Stage.QUEUE: 0.1,
        Stage.TOWER: 0.2,
        Stage.PREFILL: 0.3,
    }
    assert sum(stages.values()) == pytest.approx(found.seconds)
    assert all(each.start_s <= each.end_s <= found.seconds for each in found.spans)
    assert found.slowest_s == pytest.approx(0.3)


def test_waits_between_tower_and_parts_of_the_prefill_count_as_waiting() -> None:
    """Several prompts at once take turns at the target; without its waits, stages did not add up to the first token."""
    timeline = [
        {"worker": "target", "phase": "prepare", "start_s": 0.3, "end_s": 0.4},
        {"worker": "target", "phase": "prefill", "start_s": 0.6, "end_s": 0.7},
        {"worker": "target", "phase": "prefill", "start_s": 0.8, "end_s": 0.9},
    ]
    found = FirstToken(seconds=1.0, sent_s=0.0, spans=tuple(spans_of(TIMINGS, timeline, 1.0)))
    assert found.stage_s(Stage.QUEUE) == pytest.approx(0.3)
    assert sum(map(found.stage_s, Stage)) == pytest.approx(found.seconds)


def test_a_target_that_has_features_and_rows_of_the_video_has_no_tower() -> None:
    found = FirstToken(seconds=0.2, sent_s=0.0, spans=tuple(spans_of({**TIMINGS, "decode_s": 0.0}, [], 0.2)))
    assert found.stage_s(Stage.TOWER) == found.stage_s(Stage.PREFILL) == 0.0


def test_rates_at_once_compare_with_one_request_after_the_other() -> None:
    alone = ClipTimes(clip="a", num_at_once=1, num_frames=8, rounds=[[first_token()], [first_token()]])
    several = [first_token(1.5), first_token(1.5, 0.5)]
    both = ClipTimes(clip="a", num_at_once=2, num_frames=8, rounds=[several])
    assert clip_row(alone)["answers_per_s"] == pytest.approx(1.0)
    assert clip_row(both)["answers_per_s"] == pytest.approx(1.0)  # the second ended after 2 s
    report = first_token_report([alone, both], "target a, draft b")
    figures = json.loads(report.to_json())
    assert [row["over_one_by_one"] for row in figures["clips"]] == pytest.approx([1.0, 1.0])
    assert figures["rounds"][0]["rounds"][0][0]["spans"][1]["stage"] == "decode"
    assert "over stage" in text_of(report)


def test_clips_of_one_name_are_compared_each_with_itself() -> None:
    times = [
        ClipTimes(clip="x.mp4", num_at_once=count, num_frames=8, rounds=[[first_token(seconds)] * count])
        for seconds in (1.0, 4.0)
        for count in (1, 2)
    ]
    rows = first_token_report(times, "models").figures["clips"]
    assert [row["over_one_by_one"] for row in rows] == pytest.approx([1.0, 2.0, 1.0, 2.0])


def test_both_workers_are_drawn(tmp_path: Path) -> None:
    times = [
        ClipTimes(clip="a$b^^$", num_at_once=count, num_frames=8, rounds=[[first_token()] * count]) for count in (1, 8)
    ]
    assert draws(first_token_report(times, "models"), tmp_path, "plot")


def test_a_clip_that_a_server_with_a_key_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer the-key"
        return httpx.Response(422, json={"error": {"message": "It is too long."}})

    server = LocalServer("http://x", None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(loopback, "_transport", lambda *_: httpx.MockTransport(refuse))
    monkeypatch.setattr(first_token_bench, "local_server", lambda _: nullcontext(server))
    with pytest.raises(ConfigError, match=r"^scene of 4 s: the server refused the clip: It is too long\."):
        measure_first_tokens(FirstTokenOptions(rendered_s=0.0), (), "the-key", lambda *_: None)


@pytest.mark.anyio
async def test_an_answer_of_another_server_ends_the_bench() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(ConfigError, match="gave no answer"):
            await send_clip(client, FirstTokenOptions(), b"clip", 0.0)


def test_requests_of_a_round_send_one_file_only_if_asked() -> None:
    copies = cycle_clips([b"clip"], is_repeated=False)
    assert len(set(FirstTokenOptions().files_of_round(copies, 3))) == 3
    same = [FirstTokenOptions(is_same=True).files_of_round(copies, 3) for _ in range(2)]
    assert [len(set(files)) for files in same] == [1, 1]
    assert same[0] != same[1]
