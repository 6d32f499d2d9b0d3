"""`include`: requested extras come with the answer, whole or streamed; extras that were not requested are absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.world import FILE, URL, World
from tests.fakes import FINISHED, PROMPT_READY, FakeEngine
from vidspec_models.request import Include, Preservation
from vidspec_service.engine.types import (
    Activity,
    DraftView,
    Phase,
    SeenCells,
    TextDelta,
    TokenDetail,
    TokenSource,
)

pytestmark = [pytest.mark.api, pytest.mark.anyio]

DRAFT, TARGET = TokenSource.DRAFT, TokenSource.TARGET
WORK = Activity(request_id="", worker="target", phase=Phase.VERIFY, start=1.0, end=2.0, num_tokens=4)
VIEW = DraftView(
    request_id="",
    preservation=Preservation.HIPPO,
    prune_ratio=0.9,
    videos=(SeenCells(shape=(3, 1, 2), bits=bytes([0b100010])),),
)
SCRIPT = (
    PROMPT_READY,
    VIEW,
    TextDelta(text="A", num_tokens=1, details=(TokenDetail(text="A", source=TARGET),)),
    WORK,
    TextDelta(text=" red", num_tokens=1, details=(TokenDetail(text=" red", source=DRAFT),)),
    TextDelta(text="", num_tokens=1, details=(TokenDetail(text="", source=TARGET),)),
    FINISHED,
)
EVERYTHING = ["token_details", "draft_view", "timeline"]
DETAILS = [{"text": "A", "source": "target"}, {"text": " red", "source": "draft"}, {"text": "", "source": "target"}]


async def test_a_whole_answer_has_what_was_asked_for(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*SCRIPT))
    answer = (await world.ask(include=EVERYTHING)).json()
    assert answer["choices"][0]["token_details"] == DETAILS
    assert answer["draft_view"] == {
        "preservation": "hippo",
        "prune_ratio": 0.9,
        "videos": [
            {
                "rows": 1,
                "columns": 2,
                "frames": [
                    {"timestamp_s": 0.0, "cells": [1]},
                    {"timestamp_s": 1.0, "cells": []},
                    {"timestamp_s": 2.0, "cells": [1]},
                ],
            }
        ],
    }
    (span,) = answer["timeline"]
    assert (span["worker"], span["phase"], span["num_tokens"]) == ("target", "verify", 4)
    assert span["end_s"] - span["start_s"] == pytest.approx(1.0)
    assert world.engine.requests[0].include == frozenset(Include)


async def test_each_event_has_what_is_new(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*SCRIPT))
    response = await world.client.post(URL, files=FILE, data={"prompt": "x", "stream": "true", "include": EVERYTHING})
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    told = [event["choices"][0].get("token_details") for event in events if event["choices"]]
    assert told == [None, DETAILS[:1], DETAILS[1:2], DETAILS[2:], None]
    assert ["draft_view" in event for event in events] == [True, False, False, False, False, False]
    assert [len(event["timeline"]) for event in events] == [0, 0, 1, 0, 0, 0]


async def test_nothing_is_told_unasked(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*SCRIPT))
    answer = (await world.ask()).json()
    assert not {"draft_view", "timeline"} & set(answer)
    assert "token_details" not in answer["choices"][0]
    assert world.engine.requests[0].include == frozenset()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": ["everything"]}, "include.0"),
        ({"include": EVERYTHING * 2}, "include"),
        ({"preservation": "hipo"}, "preservation"),
        ({"prune_ratio": 1.0}, "prune_ratio"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, fields: dict[str, object], param: str) -> None:
    response = await World(tmp_path).ask(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_request_says_whose_work_it_shares_in_every_dialect(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ask(cache_salt="a")
    await world.ask_form(cache_salt="a")
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("completions", {"model": "fake-target", "prompt": "x"}),
        ("responses", {"input": "x"}),
    ):
        assert (await world.client.post(f"/v1/{path}", json={**body, "cache_salt": "a"})).status_code == 200, path
    assert [request.cache_salt for request in world.engine.requests] == ["a"] * 5


async def test_a_request_says_what_its_draft_sees_in_both_dialects(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ask(preservation="uniform", prune_ratio=0.5)
    body = {"messages": [{"role": "user", "content": "x"}], "preservation": "uniform", "prune_ratio": 0.5}
    assert (await world.client.post("/v1/chat/completions", json=body)).status_code == 200
    for request in world.engine.requests:
        assert (request.preservation, request.prune_ratio) == (Preservation.UNIFORM, 0.5)
    response = await world.client.post("/v1/chat/completions", json={**body, "include": ["timeline"]})
    assert response.status_code == 400, "that dialect has OpenAI's answers"
