"""A request takes its place before any work is done for it, or is told at once that there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.api.test_stream import events_of
from tests.api.world import FILE, URL, World
from tests.fakes import ANSWER, FakeDecodePool, FakeEngine
from vidspec_service.errors import Draining

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def until_admitted(world: World, count: int) -> None:
    """Wait until so many requests are inside."""
    async with asyncio.timeout(5):
        while world.admission.num_admitted != count:  # noqa: ASYNC110  nothing tells a test
            await asyncio.sleep(0.001)


async def test_a_full_server_says_so_before_it_reads_or_decodes(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), max_running_requests=1, max_queued_requests=1)
    inside = [asyncio.create_task(world.ask()) for _ in range(2)]
    await until_admitted(world, 2)
    response = await world.client.post(URL, files=FILE, data={"nonsense": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "queue_full")
    assert world.metric("admission_rejections_total", reason="queue_full") == 1
    gate.set()
    assert [(await task).status_code for task in inside] == [200, 200]
    assert len(world.decoder.requests) == 2
    assert (await world.ask()).status_code == 200


async def test_every_way_out_gives_the_place_back(tmp_path: Path) -> None:
    world = World(tmp_path, max_running_requests=1, max_queued_requests=0)
    for fields in ({}, {"stream": True}, {"prompt": None}, {"fps": 0}, {"video_id": "x"}) * 2:
        await world.ask(**fields)
        assert world.admission.num_admitted == 0
    assert (await world.ask()).status_code == 200


async def test_a_streamed_answer_keeps_its_place_until_its_last_byte(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]))
    streamed = asyncio.create_task(world.ask(stream=True))
    await until_admitted(world, 1)
    await asyncio.sleep(0.02)
    assert world.admission.num_admitted == 1
    assert len(world.leftovers) == 1
    gate.set()
    assert (await streamed).status_code == 200
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_an_engine_that_is_not_ready_is_a_503_that_tells_no_secrets(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(is_ready=False))
    response = await world.ask()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "10"
    error = response.json()["error"]
    assert error["code"] == "engine_dead"
    assert "secret" not in error["message"]
    assert world.decoder.requests == []


async def test_a_draining_server_finishes_what_runs_and_admits_nothing(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]))
    running = asyncio.create_task(world.ask(stream=True))
    await until_admitted(world, 1)
    world.admission.start_draining()
    refused = await world.ask()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["retry-after"] == "1"
    idle = asyncio.create_task(world.admission.wait_idle())
    await asyncio.sleep(0.01)
    assert not idle.done()
    gate.set()
    assert events_of((await running).text)[-1] == "[DONE]"
    await asyncio.wait_for(idle, 1)


async def test_when_the_drain_is_over_streams_get_an_error_event_and_others_a_503(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    streamed = asyncio.create_task(world.ask(stream=True))
    whole = asyncio.create_task(world.ask())
    await until_admitted(world, 2)
    await asyncio.sleep(0.05)
    world.admission.close()
    events = events_of((await streamed).text)
    assert events[-2]["error"]["code"] == Draining.code
    assert (await whole).status_code == 503
    assert len(world.engine.cancelled) == 2
    await asyncio.wait_for(world.admission.wait_idle(), 1)
    assert world.leftovers == []


async def test_closing_ends_a_decode_too(tmp_path: Path) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(gate=asyncio.Event()))
    waiting = asyncio.create_task(world.ask())
    await until_admitted(world, 1)
    await asyncio.sleep(0.05)
    world.admission.close()
    assert (await waiting).status_code == 503
    assert world.decoder.num_cancelled == 1


async def test_sixteen_at_once_are_all_answered_and_none_mixed_up(tmp_path: Path) -> None:
    world = World(tmp_path)
    answers = await asyncio.gather(*(world.ask(prompt=f"q{index}", stream=index % 2 == 0) for index in range(16)))
    assert [answer.status_code for answer in answers] == [200] * 16
    assert sorted(request.messages[0].text for request in world.engine.requests) == sorted(
        f"q{index}" for index in range(16)
    )
    assert world.admission.num_admitted == 0
